"""Layers to route at: not the ones that give the module's output."""

import pytest
import torch
from torch import nn

from merganser.experts.activations import output_layers
from merganser.experts.layers import leading_layers
from support.expert_nets import encoder, expert_of, library_of


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 9)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, x):
        return self.lm_head(self.body(x))


def test_heads_are_known_by_name_or_place():
    assert output_layers(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))) == {"2"}
    assert output_layers(Named()) == {"lm_head"}
    assert output_layers(nn.Sequential(nn.Linear(4, 3), nn.Tanh())) == set()
    assert output_layers(nn.Linear(4, 3)) == {""}
    assert output_layers(encoder()) == {"blocks.2.down"}


@pytest.mark.parametrize("wide", [False, True])
def test_the_output_layer_is_not_routed_at(tmp_path, wide):
    """Experts whose hidden layers read the same directions and whose output layers read orthogonal ones."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10)).eval()
    basis = torch.linalg.qr(torch.randn(16, 16)).Q
    experts = {}
    for index, task in enumerate("ab"):
        state = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        own = basis[:, 2 * index : 2 * index + 2]
        state["4.weight"] += torch.randn(10, 2) @ own.T
        for hidden in ("0", "2"):
            state[f"{hidden}.weight"] += torch.randn(16, 2) @ (own if wide else basis[:, :2]).T
        experts[task] = state
    library = library_of(tmp_path, base, experts, rank_fraction=0.13)
    assert leading_layers(library, base, share=1.0) == ["0", "2"]


def test_a_module_of_one_layer_is_routed_at_it(tmp_path):
    base = nn.Sequential(nn.Linear(16, 16)).eval()
    library = library_of(tmp_path, base, {task: expert_of(base, seed, rank=2) for seed, task in enumerate("ab")})
    assert leading_layers(library, base) == ["0"]
