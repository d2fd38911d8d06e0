"""The symmetries of experts in fused tensors: their order, and that of the units of each; and what forbids them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from derivation_nets import freedom
from torch import Tensor, nn

from merganser.align import match, symmetry
from merganser.align.permutations import apply, inverse, random
from merganser.align.tracing import nesting

X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
Pick = Callable[["Experts", Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """Four experts of six units each, two of them for every sample."""

    def __init__(self, pick: Pick, largest: bool = True, ordered: bool = True) -> None:
        super().__init__()
        self.pick, self.largest, self.ordered = pick, largest, ordered
        self.embed, self.router, self.head = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 3)
        self.up, self.shift = nn.Parameter(torch.randn(4, 12, 8)), nn.Parameter(torch.randn(4, 12))
        self.down = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        weights, experts = self.router(x).softmax(-1).topk(2, largest=self.largest, sorted=self.ordered)
        picked = self.pick(self, x.repeat_interleave(2, 0), experts) * weights.reshape(-1, 1)
        return self.head(x + picked.view(-1, 2, 8).sum(1))


def batched(net: Experts, x: Tensor, experts: Tensor) -> Tensor:
    chosen = experts.reshape(-1)
    return project(net, chosen, hidden(net, chosen, x))


def hidden(net: Experts, chosen: Tensor, x: Tensor) -> Tensor:
    gate, up = (torch.bmm(net.up[chosen], x.unsqueeze(-1)).squeeze(-1) + net.shift[chosen]).chunk(2, -1)
    return nn.functional.silu(gate) * up


def project(net: Experts, chosen: Tensor, units: Tensor) -> Tensor:
    return torch.bmm(net.down[chosen], units.unsqueeze(-1)).squeeze(-1)


def of_another_index(net: Experts, x: Tensor, experts: Tensor) -> Tensor:
    """The units of one expert go into the other expert of the sample."""
    return project(net, experts[:, [1, 0]].reshape(-1), hidden(net, experts.reshape(-1), x))


def of_another_tensor(net: Experts, x: Tensor, experts: Tensor) -> Tensor:
    """As above; the order of experts is not lost on the way."""
    return project(net, experts.permute(1, 0).reshape(-1), hidden(net, experts.reshape(-1), x))


def shifted(net: Experts, x: Tensor, experts: Tensor) -> Tensor:
    """The units of one sample go into the expert of the next."""
    chosen = experts.reshape(-1)
    return project(net, chosen, hidden(net, chosen, x).roll(1, 0))


def sliced(net: Experts, x: Tensor, experts: Tensor) -> Tensor:
    chosen = experts.reshape(-1)
    units = hidden(net, chosen, x)
    return project(net, chosen, torch.cat([units[1:], units[:1]]))


def averaged(net: Experts, x: Tensor, experts: Tensor) -> Tensor:
    chosen = experts.reshape(-1)
    units = hidden(net, chosen, x)
    return project(net, chosen, units + units.mean(0))


def transposed(net: Experts, x: Tensor, experts: Tensor) -> Tensor:
    chosen = experts.reshape(-1)
    units = hidden(net, chosen, x)
    return project(net, chosen, (units @ units.transpose(0, 1)).softmax(-1) @ units)


def added(net: Experts, x: Tensor, experts: Tensor) -> Tensor:
    return batched(net, x, (experts + 1) % 4)


def added_in_place(net: Experts, x: Tensor, experts: Tensor) -> Tensor:
    chosen = experts.reshape(-1).clone()
    chosen.add_(1).remainder_(4)
    return batched(net, x, chosen)


def measured(net: Experts, x: Tensor, experts: Tensor) -> Tensor:
    return batched(net, x, experts) * (1 + experts.reshape(-1, 1))


def picked_twice(net: Experts, x: Tensor, experts: Tensor) -> Tensor:
    return batched(net, x, experts[torch.arange(7)])


def test_experts_move_and_so_do_the_units_of_each() -> None:
    assert sorted(freedom(symmetry(Experts(batched), X)).values()) == [(4,), (4, 6), (8,)]
    assert sorted(freedom(symmetry(Experts(batched, largest=False), X)).values()) == [(4,), (4, 6), (8,)]


@pytest.mark.parametrize("pick", [of_another_tensor, shifted, sliced, averaged, transposed])
def test_units_that_meet_another_expert_have_one_order(pick: Pick) -> None:
    assert sorted(freedom(symmetry(Experts(pick), X)).values()) == [(4,), (6,), (8,)]


@pytest.mark.parametrize("pick", [of_another_index, added, added_in_place, measured, picked_twice])
def test_experts_whose_number_matters_stay(pick: Pick) -> None:
    assert sorted(freedom(symmetry(Experts(pick), X)).values()) == [(6,), (8,)]


def test_families_that_are_too_large_to_match_share_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nesting, "LARGEST_FAMILY", 4 * 6)
    assert sorted(freedom(symmetry(Experts(batched), X)).values()) == [(4,), (4, 6), (8,)]
    monkeypatch.setattr(nesting, "LARGEST_FAMILY", 4 * 6 - 1)
    assert sorted(freedom(symmetry(Experts(batched), X)).values()) == [(4,), (6,), (8,)]


def test_experts_in_no_order_stay() -> None:
    assert sorted(freedom(symmetry(Experts(batched, ordered=False), X)).values()) == [(6,), (8,)]


@pytest.mark.parametrize("read", ["gather", "take_along_dim"])
def test_experts_chosen_by_one_score_and_weighted_by_another(read: str) -> None:
    """As DeepSeek-V3 and Ernie do: a bias takes part in the choice, not in the weights."""

    class Corrected(Experts):
        def __init__(self) -> None:
            super().__init__(batched)
            self.correction = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            scores = self.router(x).sigmoid()
            _, experts = (scores + self.correction).topk(2)
            weights = scores.gather(1, experts) if read == "gather" else scores.take_along_dim(experts, 1)
            picked = self.pick(self, x.repeat_interleave(2, 0), experts) * weights.reshape(-1, 1)
            return self.head(x + picked.view(-1, 2, 8).sum(1))

    found = symmetry(Corrected(), X)
    assert sorted(freedom(found).values()) == [(4,), (4, 6), (8,)]
    assert found.free("correction") == found.free("router.bias")


def test_scores_read_at_other_places_pin_the_experts() -> None:
    class Shifted(Experts):
        def forward(self, x: Tensor) -> Tensor:
            scores = self.router(self.embed(x))
            _, experts = scores.topk(2)
            return self.head(self.embed(x)) * scores.gather(1, (experts + 1) % 4).sum()

    assert (4,) not in freedom(symmetry(Shifted(batched), X, allow_unused=True)).values()


def test_the_numbers_of_experts_as_an_output_pin_them() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.router = nn.Linear(5, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            values, indices = self.router(self.embed(x).relu()).topk(2)
            return values, indices

    assert freedom(symmetry(Router(), X)) == {"embed": (8,)}


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=12, num_attention_heads=2, num_key_value_heads=2,
        num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    network: nn.Module = transformers.MixtralForCausalLM(config)
    return network


def test_mixtral_experts() -> None:
    net = mixtral()
    tokens = torch.arange(18).reshape(2, 9)
    found = symmetry(net, {"input_ids": tokens}, outputs="logits")
    experts = "model.layers.0.mlp.experts"
    assert freedom(found)[experts] == (4, 12)
    assert found.atoms[experts].parent == "model.layers.0.mlp.gate"
    state = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    noisy = {n: t + 0.1 * t.std() * torch.randn(t.shape, generator=generator) for n, t in state.items()}
    secret = random(found, 3)
    matched = match(state, apply(found, secret, noisy), found)
    back = inverse(found, secret)
    assert all(np.array_equal(index, back[name]) for name, index in matched.permutations.items())
