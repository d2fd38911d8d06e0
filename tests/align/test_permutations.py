"""The group laws of permutations and of their action, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from merganser.align import permutations as perms
from merganser.align.blocks import move
from merganser.align.symmetries import Atom, Factor, Symmetry, concatenation, product
from merganser.errors import InputError

KV, QUERY, UNIT, STREAM = Factor("kv", 3), Factor("query", 2), Factor("unit", 4), Factor("stream", 6)
NESTED = Symmetry(
    {
        "kv": Atom("kv", 3),
        "query": Atom("query", 2, "kv"),
        "unit": Atom("unit", 4, "kv"),
        "deep": Atom("deep", 2, "query"),
        "stream": Atom("stream", 6),
    },
    {
        "o": (product(STREAM), product(KV, QUERY, UNIT)),
        "v": (product(KV, UNIT), product(STREAM)),
        "deep": (product(KV, QUERY, Factor("deep", 2)),),
        "joined": (
            concatenation(product(STREAM), product(Factor(None, 2)), product(KV, UNIT)),
            product(Factor(None, 5)),
        ),
    },
)
SHAPES = {name: NESTED.tensor_shape(name) for name in NESTED.axes}
seeds = st.integers(0, 2**32 - 1)


def draw_state(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@given(seeds, st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.float64]))
def test_inverse_undoes_bit_for_bit(seed: int, dtype: torch.dtype) -> None:
    state, p = draw_state(dtype), perms.random(NESTED, seed)
    before = {name: tensor.clone() for name, tensor in state.items()}
    moved = perms.apply(NESTED, p, state)
    assert same(perms.apply(NESTED, perms.inverse(NESTED, p), moved), state)
    assert same(state, before)


@given(seeds, seeds, seeds)
def test_composition_is_one_after_the_other_and_associative(a: int, b: int, c: int) -> None:
    state = draw_state()
    p, q, r = (perms.random(NESTED, seed) for seed in (a, b, c))
    pq = perms.compose(NESTED, p, q)
    assert same(perms.apply(NESTED, pq, state), perms.apply(NESTED, q, perms.apply(NESTED, p, state)))
    left, right = perms.compose(NESTED, pq, r), perms.compose(NESTED, p, perms.compose(NESTED, q, r))
    assert all(np.array_equal(left[name], right[name]) for name in left)
    whole = perms.compose(NESTED, p, perms.inverse(NESTED, p))
    assert all(np.array_equal(whole[name], still) for name, still in perms.identity(NESTED).items())


def test_convention_by_hand() -> None:
    """New position i takes the old unit p[i]; rows of a nested atom are at new positions of the parent."""
    p = perms.random(NESTED, 3)
    state = draw_state()
    moved = perms.apply(NESTED, p, state)
    o, v = state["o"].reshape(6, 3, 2, 4), state["v"].reshape(3, 4, 6)
    for s in range(6):
        for k in range(3):
            for u in range(4):
                old = (p["kv"][k], p["unit"][k, u], p["stream"][s])
                assert moved["v"].reshape(3, 4, 6)[k, u, s] == v[old]
                for q in range(2):
                    expected = o[p["stream"][s], p["kv"][k], p["query"][k, q], p["unit"][k, u]]
                    assert moved["o"].reshape(6, 3, 2, 4)[s, k, q, u] == expected


def test_bad_permutations_and_tensors() -> None:
    p, state = perms.identity(NESTED), draw_state()
    with pytest.raises(InputError, match="repeats an index"):
        perms.apply(NESTED, {**p, "stream": np.zeros(6, dtype=np.int64)}, state)
    with pytest.raises(InputError, match=r"shape \(4,\), expected \(3, 4\)"):
        perms.apply(NESTED, {**p, "unit": np.arange(4)}, state)
    with pytest.raises(InputError, match="no permutation for atom 'kv'"):
        perms.apply(NESTED, {k: v for k, v in p.items() if k != "kv"}, state)
    with pytest.raises(InputError, match="unknown atom 'strem'; did you mean 'stream'"):
        perms.apply(NESTED, {**p, "strem": np.arange(6)}, state)
    with pytest.raises(InputError, match="'w' is not part of the symmetry"):
        perms.apply(NESTED, p, {"w": torch.zeros(2)})
    with pytest.raises(InputError, match=r"'v' has shape \(12, 5\), the symmetry was derived for \(12, 6\)"):
        perms.apply(NESTED, p, {"v": torch.zeros(12, 5)})


def test_scramble_takes_a_state_dict() -> None:
    state = draw_state()
    assert same(perms.scramble(state, NESTED, seed=4), perms.apply(NESTED, perms.random(NESTED, 4), state))


def test_units_move_on_the_device_of_the_weights():
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights, order = torch.empty(4, 3, device="cuda"), torch.tensor([1, 0, 2, 3], device="cpu")
        assert move(weights, 0, order).device.type == "cuda"
