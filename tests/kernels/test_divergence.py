"""Divergences of softmaxes: exact, and the same compiled."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine import fused
from merganser.engine.blocks import Piece
from merganser.kernels import tiles
from merganser.kernels.divergence import divergences, exponential, relative_entropy

EPSILON = Decimal.from_float(1e-8)


def exact(model, base):
    """The divergence of one row in 40 digits."""
    with localcontext() as context:
        context.prec = 40
        sides = []
        for row in (model, base):
            powers = [(Decimal(float(x)) - Decimal(float(max(row)))).exp() for x in row]
            sides.append([power / sum(powers) + EPSILON for power in powers])
        return sum(p * (p / q).ln() for p, q in zip(*sides, strict=True))


def test_exponentials_are_right_to_the_last_bits():
    numbers = np.random.default_rng(0)
    x = np.concatenate([-(10 ** numbers.uniform(-12, 2.85, 500)), [0.0, -708.0, -0.34657359, -0.3465736]])
    with localcontext() as context:
        context.prec = 30
        errors = [abs(Decimal(float(y)) / Decimal(float(v)).exp() - 1) for v, y in zip(x, exponential(x), strict=True)]
    assert max(errors) < 4e-16
    assert exponential(np.array([0.0, -np.inf, -800.0])).tolist() == [1.0, *[exponential(np.array([-708.0]))[0]] * 2]


def test_relative_entropies_do_not_cancel():
    numbers = np.random.default_rng(1)
    q = 10 ** numbers.uniform(-8, 0, 600)
    p = np.concatenate([10 ** numbers.uniform(-8, 0, 300), q[300:] * (1 + 10 ** numbers.uniform(-14, 0, 300))])
    with localcontext() as context:
        context.prec = 60
        for a, b, found in zip(p, q, relative_entropy(p, q), strict=True):
            one, two = Decimal(float(a)), Decimal(float(b))
            assert abs(Decimal(float(found)) / (one * (one / two).ln() - one + two) - 1) < 3e-15


@pytest.mark.parametrize("scale", [0.0, 1e-7, 1e-5, 1e-3, 1e-1, 10.0, 500.0])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_divergences_are_those_of_exact_arithmetic(scale, shift):
    numbers = np.random.default_rng(2)
    base = numbers.standard_normal((3, 50))
    model = base + shift + scale * numbers.standard_normal((3, 50))
    found = divergences(torch.from_numpy(model), torch.from_numpy(base), 50)
    assert found.dtype == np.float64
    for m, b, divergence in zip(model, base, found, strict=True):
        wanted = float(exact(m, b))
        assert abs(divergence - wanted) <= 2e-15 * max(wanted, 0) ** 0.5 + 1e-14 * wanted + 1e-30
        assert divergence >= 0


def test_equal_rows_do_not_diverge():
    row = torch.randn(4, 9)
    np.testing.assert_array_equal(divergences(row, row.clone(), 9), np.zeros(4, np.float32))


@pytest.mark.skipif(tiles.library() is None, reason="the compiled runner was not built (no C compiler)")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 7, 8, 9, 127, 129, 300, 1023, 1024, 1025, 2600]),
    st.integers(1, 40),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.sampled_from([0.0, 1e-5, 1e-3, 1.0, 30.0, 1e4, 3e38]),
    st.integers(0, 2**32 - 1),
)
def test_compiled_divergences_have_the_same_bits(length, rows, dtype, scale, seed):
    numbers = np.random.default_rng(seed)
    base = numbers.standard_normal((rows, length)) * numbers.choice([1e-3, 1.0, 1e3])
    model = base + scale * numbers.uniform(-1, 1, (rows, length))
    limit = torch.finfo(dtype).max
    stored = [torch.from_numpy(side.clip(-limit, limit)).to(dtype) for side in (model, base)]
    recorded = fused.record(
        lambda group: divergences(*group.models, length),
        {"name": "w", "models": 2, "base": False, "shape": (rows, length), "labels": ("a", "b")},
    )
    addresses = fused.Addresses.of([StoredEntries.of(side) for side in stored], 0)
    (found,) = fused.find(recorded, addresses, Piece(0, rows, 0, rows * length))
    np.testing.assert_array_equal(found, divergences(*(side.float() for side in stored), length))
