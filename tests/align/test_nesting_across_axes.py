"""Units that are nested in an index on another axis of the same weight: heads × channels as two axes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from align_networks import trained_like
from derivation_nets import freedom
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from merganser.align import match, self_test, symmetry, universe
from merganser.align.blocks import blocks
from merganser.align.permutations import apply, compose, identity, inverse, random
from merganser.align.symmetries import Atom, Factor, Symmetry, concatenation, product
from merganser.align.terms import TermLayout
from merganser.errors import InputError

X = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))


class EinsumAttention(nn.Module):
    """Attention whose projections have an axis for heads and one for channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 12), nn.Linear(12, 2)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(12, 3, 4)) for _ in range(3))
        self.shift, self.out = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (torch.einsum("bsm,mhd->bshd", x, w) for w in (self.q, self.k, self.v))
        scores = torch.einsum("bshd,bthd->bhst", q + self.shift, k).softmax(-1)
        return self.head(x + torch.einsum("bshd,hdm->bsm", torch.einsum("bhst,bthd->bshd", scores, v), self.out))


class HeadMatrices(nn.Module):
    """A matrix for every head between two sets of units: they may not both have an order for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = (nn.Parameter(torch.randn(3, *s)) for s in ((4, 5), (6, 4), (2, 6)))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.einsum("bsm,hdm->bshd", x, self.up).relu()
        second = torch.einsum("bshd,hed->bshe", first, self.middle).relu()
        return torch.einsum("bshe,hoe->bso", second, self.down)


def shared_channels(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("bshd,hdo->bso", x.relu(), weight)


class SharedScale(nn.Module):
    """One scale for each channel, whatever the head: channels have one order."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = (nn.Parameter(torch.randn(*s)) for s in ((5, 3, 4), (4,), (3, 4, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return shared_channels(torch.einsum("bsm,mhd->bshd", x, self.up) * self.scale, self.down)


def test_einsum_attention_has_channels_for_each_head() -> None:
    found = symmetry(EinsumAttention(), X)
    assert sorted(freedom(found).values()) == [(3,), (3, 4), (3, 4), (12,)]
    moved = {name: next(blocks(found, name)).shape for name in ("q", "out", "head.weight")}
    assert moved == {"q": (12, 12, 1), "out": (12, 12, 1), "head.weight": (12, 2)}


def test_two_sets_of_units_of_one_matrix_are_not_both_nested() -> None:
    assert sorted(freedom(symmetry(HeadMatrices(), X)).values()) == [(3,), (3, 4), (6,)]


def test_units_on_both_sides_of_a_matrix_for_each_head_share_an_order() -> None:
    """The gates of RecurrentGemma read and write the units of their block."""

    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(5, 12), nn.Linear(12, 2)
            self.gate = nn.Parameter(torch.randn(3, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x).unflatten(-1, (3, 4))
            return self.head((x * torch.einsum("bshd,hde->bshe", x, self.gate).sigmoid()).flatten(-2))

    assert sorted(freedom(symmetry(Gates(), X)).values()) == [(3,), (4,)]


def test_channels_with_one_scale_for_all_heads_share_an_order() -> None:
    assert sorted(freedom(symmetry(SharedScale(), X)).values()) == [(3,), (4,)]


def test_the_self_test_refuses_an_order_for_each_head_where_there_is_one_for_all() -> None:
    found = symmetry(SharedScale(), X)
    head, channel = sorted(found.atoms.values(), key=lambda atom: atom.size)
    wrong = Symmetry(
        {head.name: head, channel.name: Atom(channel.name, 4, head.name)},
        {**{n: a for n, a in found.axes.items() if n != "scale"}, "scale": (product(Factor(None, 4)),)},
    )
    with pytest.raises(Exception, match="failed its self-test"):
        self_test(SharedScale(), wrong, X)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("method", ["weights", "frank_wolfe"])
def test_planted_permutations_are_found(noise: float, method: str) -> None:
    net = EinsumAttention()
    found = symmetry(net, X)
    state = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    noisy = {n: t + noise * t.std() * torch.randn(t.shape, generator=generator) for n, t in state.items()}
    secret = random(found, 3)
    matched = match(state, apply(found, secret, noisy), found, method=method)
    back = inverse(found, secret)
    assert all(np.array_equal(index, back[name]) for name, index in matched.permutations.items())


def test_a_universe_of_three() -> None:
    net = EinsumAttention()
    found = symmetry(net, X)
    state = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    joined = universe([apply(found, random(found, seed), state) for seed in range(3)], found)
    assert joined.cycle_error() == 0.0
    for name, tensor in joined.merged().items():
        torch.testing.assert_close(tensor, joined.to_universe(0)[name])


def _by_hand() -> Symmetry:
    """Three levels over three axes, one axis in two segments, and the same atoms on one axis elsewhere."""
    atoms = [Atom("g", 2), Atom("h", 3, "g"), Atom("d", 4, "h"), Atom("s", 5)]
    g, h, d, s = (Factor(atom.name, atom.size) for atom in atoms)
    axes = {
        "apart": (product(d), product(g), product(s), product(h)),
        "partly": (product(h, d), concatenation(product(s), product(Factor(None, 2))), product(g)),
        "beside": (product(g, h, d),),
        "twice": (concatenation(product(d), product(d)), product(g, h)),
    }
    return Symmetry({atom.name: atom for atom in atoms}, axes)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_permutations_across_axes_compose_and_invert(one: int, two: int) -> None:
    found = _by_hand()
    shapes = {name: found.tensor_shape(name) for name in found.axes}
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    p, q = random(found, one), random(found, two)
    moved = apply(found, p, state)
    assert all(torch.equal(t, state[n]) for n, t in apply(found, inverse(found, p), moved).items())
    both = apply(found, compose(found, p, q), state)
    assert all(torch.equal(t, both[n]) for n, t in apply(found, q, moved).items())


def test_the_same_units_move_alike_wherever_their_parents_stand() -> None:
    found = _by_hand()
    values = torch.randn(2, 3, 4)
    state = {
        "apart": values.permute(2, 0, 1)[:, :, None].repeat(1, 1, 5, 1),
        "partly": values.permute(1, 2, 0).reshape(12, 1, 2).repeat(1, 7, 1),
        "beside": values.reshape(-1),
        "twice": values.reshape(6, 4).T.repeat(2, 1),
    }
    moved = apply(found, random(found, 5), state)
    expected = moved["beside"].reshape(2, 3, 4)
    assert not torch.equal(expected, values)
    assert torch.equal(moved["apart"][:, :, 0].permute(1, 2, 0), expected)
    assert torch.equal(moved["partly"][:, 0].reshape(3, 4, 2).permute(2, 0, 1), expected)
    assert torch.equal(moved["twice"][4:].T.reshape(2, 3, 4), expected)


def test_layout_folds_axes_of_one_tree_together() -> None:
    terms = TermLayout.of(_by_hand()).terms
    assert {frozenset(term.paths) for term in terms} == {
        frozenset({("g", "h", "d"), ("s",)}),
        frozenset({("g", "h", "d")}),
    }


def test_a_parent_that_is_twice_elsewhere_is_refused() -> None:
    atoms = {"a": Atom("a", 4), "b": Atom("b", 3, "a")}
    a, b = Factor("a", 4), Factor("b", 3)
    with pytest.raises(
        InputError, match=r"axis 2 of 'w': nested atom 'b' needs its parent 'a' .* once on another axis"
    ):
        Symmetry(atoms, {"w": (product(a), product(a), product(b))})
    with pytest.raises(InputError, match="needs its parent 'a'"):
        Symmetry(atoms, {"w": (concatenation(product(a), product(Factor(None, 2))), product(b))})
    [block] = blocks(Symmetry(atoms, {"w": (product(a, b), product(a, b))}), "w")
    assert block.paths == (("a", "b"), ("a", "b"))


def test_pinning_the_parent_pins_across_axes() -> None:
    found = _by_hand().pin("g")
    assert set(found.atoms) == {"s"}
    assert Symmetry.from_json(_by_hand().to_json()) == _by_hand()
    assert identity(found).keys() == {"s"}


def test_trained_weights_compute_the_same_function() -> None:
    net = EinsumAttention()
    net.load_state_dict(trained_like(net, 0))
    net.double()
    found = symmetry(net, X.double())
    expected = net(X.double())
    net.load_state_dict(apply(found, random(found, 2), net.state_dict()))
    torch.testing.assert_close(net(X.double()), expected)
