"""Layers to route at, and experts of the fixed merge: outputs, redundancy, separability."""

import pytest
import torch
from torch import nn

from merganser.errors import InputError
from merganser.library import Library
from merganser.modules.activations import output_layers
from merganser.modules.inputs import Inputs
from merganser.routing.adaptive import AdaptiveModel
from merganser.routing.baselines import Smile, WeMoE
from merganser.routing.layers import (
    distinct_experts,
    filter_redundant,
    leading_layers,
    score_layers,
    sweep_layers,
    task_cosines,
)
from support.expert_nets import WIDTH, encoder, expert_of, library_of


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


def test_redundant_experts_stay_out_of_the_fixed_merge(tmp_path):
    base = encoder()
    first = expert_of(base, 1, rank=4)
    twin = {n: t + 0.02 * torch.randn(t.shape, generator=torch.Generator().manual_seed(8)) for n, t in first.items()}
    library = library_of(
        tmp_path, base, {"first": first, "twin": twin, "other": expert_of(base, 2, rank=4)}, rank_fraction=0.25
    )
    deltas = [
        torch.cat([(library.expert(task).read(n) - t).flatten().double() for n, t in base.state_dict().items()])
        for task in library.experts
    ]
    naive = torch.tensor([[float(torch.cosine_similarity(a, b, dim=0)) for a in deltas] for b in deltas])
    torch.testing.assert_close(task_cosines(library).float(), naive, atol=1e-4, rtol=0)
    assert distinct_experts(library, 0.3) == ("first", "other")
    assert distinct_experts(library, None) == library.experts
    assert distinct_experts(library, 1.0) == library.experts
    assert distinct_experts(library, -1.0) == ("first",)
    with pytest.raises(InputError):
        distinct_experts(library, 2.0)
    assert AdaptiveModel(base, library).accepted == ("first", "other")
    assert filter_redundant("ab", torch.ones(2, 2), 0.99) == ("a",)


def test_layers_are_scored_with_and_without_data(tmp_path):
    base = encoder()
    library = library_of(tmp_path, base, {task: expert_of(base, seed, rank=4) for seed, task in enumerate("ab")})
    x = torch.randn(12, 5, WIDTH)
    scores = score_layers(base, library)
    assert [score.layer for score in scores] == [f"blocks.{i}.{part}" for i in range(3) for part in ("up", "down")]
    assert all(0 <= score.separability <= 1 for score in scores)
    model = AdaptiveModel(base, library)
    assert model.router.layers == ("blocks.0.up", "blocks.0.down")
    swept = sweep_layers(model, {"a": [x[:6]], "b": [{"x": x[6:9]}, (x[9:],)]})
    assert swept == sweep_layers(model, {"a": [Inputs((x[:6],))], "b": [Inputs((x[6:],))]})
    assert [score.layer for score in swept] == [score.layer for score in scores]
    assert all(0 <= score.accuracy <= score.accuracy_among_top <= 1 for score in swept)


def test_orthogonal_subspaces_separate_and_equal_ones_do_not(tmp_path):
    """Two layers of one width; in the first the experts read orthogonal directions, in the second the same ones."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    basis = torch.linalg.qr(torch.randn(8, 8)).Q
    experts = {}
    for index, task in enumerate("ab"):
        state = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        state["0.weight"] += torch.randn(8, 2) @ basis[:, 2 * index : 2 * index + 2].T
        state["1.weight"] += torch.randn(8, 2) @ basis[:, :2].T
        experts[task] = state
    first, second = score_layers(base, library_of(tmp_path, base, experts, rank_fraction=0.25))
    assert first.separability == pytest.approx(1, abs=1e-5)
    assert second.separability == pytest.approx(0, abs=1e-5)
    assert first.chance == second.chance == 0.75
    # Seen through the other layer, task a flows where a reads, and b where a reads too.
    assert first.margin == pytest.approx(0, abs=1e-5)
    assert second.margin == pytest.approx((0 - 0 + 1 - 1) / 2, abs=1e-5)


def test_classifiers_of_their_own_are_neither_scored_nor_gated(tmp_path):
    def network(classes):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, classes))

    base = network(4)
    shared = {name: tensor for name, tensor in base.state_dict().items() if not name.startswith("4.")}
    experts = {}
    for task, classes in (("a", 3), ("b", 5)):
        moved = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in shared.items()}
        experts[task] = network(classes).state_dict() | moved
    library = Library.build(base, experts, tmp_path / "lib", rank_fraction=0.25)
    assert [score.layer for score in score_layers(base, library)] == ["0", "2"]
    heads = {task: nn.Linear(4, 2) for task in library.experts}
    for baseline in (Smile, WeMoE):
        model = baseline(base, library, heads)
        assert "4" not in model.stacks
        assert len(model(torch.randn(5, 8)).tasks) == 5
