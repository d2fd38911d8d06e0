"""Freedom that holds for the example inputs only is no freedom: other inputs reach further, or take another branch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from derivation_nets import freedom
from torch import Tensor, nn

from merganser.align import match, merge_many, scramble, symmetry, universe
from merganser.errors import InputError


def difference(net: nn.Module, *args: object, found: object = None, **kwargs: object) -> float:
    """How far a scrambled copy is from the network on other inputs than the example."""
    twin = scramble(net, found, seed=3)  # type: ignore[call-overload]
    return float((net(*args, **kwargs) - twin(*args, **kwargs)).abs().max().detach())


class Positions(nn.Module):
    """A table of positions of which as many rows are used as there are tokens."""

    def __init__(self, rows: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.embedding, self.table = nn.Embedding(11, 6), nn.Parameter(torch.randn(16, 6))
        self.up, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.rows = rows

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.relu(self.up(self.embedding(tokens) + self.rows(self.table, tokens.shape[1]))))


@pytest.mark.parametrize(
    "rows",
    [
        lambda table, n: table[:n],
        lambda table, n: (table * 2)[:n],
        lambda table, n: table[None].expand(2, -1, -1)[0, :n],
        lambda table, n: table.narrow(0, 16 - n, n),
        lambda table, n: table.split([n, 16 - n])[0],
    ],
)
def test_rows_beyond_the_example_stay(rows: Callable[[Tensor, int], Tensor]) -> None:
    net = Positions(rows).double().eval()
    found = symmetry(net, torch.zeros(2, 4, dtype=torch.long))
    assert freedom(found) == {"table": (6,), "up": (12,)}
    for length in (2, 4, 9, 16):
        assert difference(net, torch.randint(11, (2, length)), found=found) < 1e-12


def test_learned_tokens_of_which_some_are_used_stay() -> None:
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents, self.head = nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 2)

        def forward(self, x: Tensor, n: int = 4) -> Tensor:
            return self.head(((self.latents[:n] @ x.T).softmax(-1) @ x).amax(0))

    net = Latents().double().eval()
    found = symmetry(net, torch.randn(5, 4).double())
    assert freedom(found) == {}
    assert difference(net, torch.randn(5, 4).double(), n=3, found=found) == 0.0


def test_a_causal_mask_stays() -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)
            self.register_buffer("mask", torch.tril(torch.ones(12, 12)).view(1, 1, 12, 12))

        def forward(self, x: Tensor) -> Tensor:
            batch, n, _ = x.shape
            q, k, v = (part.view(batch, n, 2, 4).transpose(1, 2) for part in self.qkv(x).split(8, 2))
            scores = (q @ k.mT).masked_fill(self.mask[:, :, :n, :n] == 0, float("-inf"))
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, n, 8))

    net = Causal().double().eval()
    found = symmetry(net, torch.randn(1, 4, 8).double())
    assert not found.free("mask")
    assert sorted(freedom(found).values()) == [(2,), (2, 4), (2, 4)]
    assert difference(net, torch.randn(2, 12, 8).double(), found=found) < 1e-12


@pytest.mark.parametrize("shape", [(3, 8), (24,)])
def test_indices_that_were_not_selected_share_the_units_of_the_one_that_was(shape: tuple[int, ...]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.scale, self.b = nn.Linear(5, 8), nn.Parameter(torch.randn(shape)), nn.Linear(8, 2)

        def forward(self, x: Tensor, task: int = 1) -> Tensor:
            return self.b(F.relu(self.a(x)) * self.scale.view(3, 8)[task])

    net = Scaled().double().eval()
    x = torch.randn(4, 5).double()
    found = symmetry(net, x)
    assert freedom(found) == {"scale": (8,)}
    assert max(difference(net, x, task=task, found=found) for task in range(3)) < 1e-12


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(5, 12), nn.Linear(12, 3), nn.Linear(12, 2)

    def forward(self, x: Tensor, task: str = "one") -> Tensor:
        hidden = F.relu(self.trunk(x))
        return self.one(hidden) if task == "one" else self.two(hidden)


def test_a_branch_that_was_not_taken_is_refused_unless_allowed_or_shown() -> None:
    net, x = Heads().double().eval(), torch.randn(4, 5).double()
    with pytest.raises(InputError, match="leave out weights .* 'two.weight'; give more_examples"):
        symmetry(net, x)
    assert freedom(symmetry(net, x, allow_unused=True)) == {"trunk": (12,)}
    with pytest.raises(InputError, match="a sequence of example inputs"):
        symmetry(net, x, more_examples={"x": x, "task": "two"})  # type: ignore[arg-type]
    found = symmetry(net, x, more_examples=[(x, "two")])
    assert freedom(found) == {"trunk": (12,)}
    for task in ("one", "two"):
        assert difference(net, x, task, found=found) < 1e-12


@pytest.mark.parametrize("way", ["flattened", "beside others"])
def test_a_branch_that_reads_units_in_a_wider_axis_is_refused(way: str) -> None:
    """Twelve channels in 48 features, or twelve units beside three inputs: no axis is twelve long."""

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.one, self.two = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 2, 1), nn.Linear(48, 2)

        def forward(self, x: Tensor, task: str = "one") -> Tensor:
            hidden = F.relu(self.trunk(x))
            return self.one(hidden) if task == "one" else self.two(hidden.flatten(1))

    class Beside(Heads):
        def __init__(self) -> None:
            super().__init__()
            self.two = nn.Linear(17, 2)

        def forward(self, x: Tensor, task: str = "one") -> Tensor:
            hidden = F.relu(self.trunk(x))
            return self.one(hidden) if task == "one" else self.two(torch.cat([hidden, x], 1))

    net, x = (Image(), torch.randn(4, 3, 2, 2)) if way == "flattened" else (Beside(), torch.randn(4, 5))
    net, x = net.double().eval(), x.double()
    with pytest.raises(InputError, match=r"leave out weights .* 'two\.weight'; give more_examples"):
        symmetry(net, x)
    blind = symmetry(net, x, allow_unused=True)
    assert difference(net, x, "two", found=blind) > 1e-3
    shown = symmetry(net, x, more_examples=[(x, "two")])
    assert freedom(shown) == {"trunk": (12,)}
    assert difference(net, x, "two", found=shown) < 1e-12


def test_narrow_weights_that_no_example_uses_are_no_branch() -> None:
    net = Heads()
    net.register_buffer("class_weights", torch.ones(3))
    assert freedom(symmetry(net, torch.randn(4, 5), more_examples=[(torch.randn(4, 5), "two")])) == {"trunk": (12,)}


def test_what_is_found_holds_for_all_examples() -> None:
    class Either(Heads):
        def forward(self, x: Tensor, task: str = "one") -> Tensor:
            hidden = F.relu(self.trunk(x))
            return self.one(hidden) if task == "one" else self.two(hidden) + hidden[:, :1]

    net, x = Either().eval(), torch.randn(4, 5)
    assert freedom(symmetry(net, x, more_examples=[{"x": x, "task": "two"}])) == {}


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty_examples_are_refused(shape: tuple[int, ...]) -> None:
    net = nn.Sequential(nn.Embedding(5, 5), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(InputError, match="an example input is empty"):
        symmetry(net, torch.zeros(shape, dtype=torch.long))


def test_units_twice_on_an_axis_stay_and_the_rest_can_be_matched() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(16, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.a(x))
            return self.c(F.relu(self.b((h[:, :, None] * h[:, None, :]).flatten(1))))

    one, two = Outer(), Outer()
    found = symmetry(one, torch.randn(3, 6))
    assert freedom(found) == {"b": (5,)}
    match(one, two, found)
    universe([one, two], found)
    merge_many([one, two], found)


def test_layers_without_units() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.none, self.b = nn.Linear(3, 6), nn.Linear(6, 0), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.a(x))
            return torch.cat([self.b(h), self.none(h)], -1)

    net = Empty().double().eval()
    found = symmetry(net, torch.randn(2, 3).double())
    assert found.tensor_shape("none.weight") == (0, 6)
    assert difference(net, torch.randn(2, 3).double(), found=found) < 1e-12
    universe([net, Empty().double()], found)
