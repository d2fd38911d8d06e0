import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merganser.kernels import selection
from merganser.kernels.selection import Cutoff, chosen, largest, largest_share


class Pieces:
    """A vector in pieces; counts how often it is read whole."""

    def __init__(self, values, size):
        self.pieces = [values[i : i + size] for i in range(0, len(values), size)] or [values]
        self.passes = 0

    def map(self, function, only=None, stride=1):
        self.passes += only is None and stride == 1
        return [function(self.pieces[index]) for index in chosen(len(self.pieces), only, stride)]


def kept(values, cutoff, size):
    """Indices kept when the cutoff is applied piece by piece."""
    marks = torch.zeros_like(values)
    for offset in range(0, max(1, len(values)), size):
        piece = values[offset : offset + size].clone()
        marked = torch.where(piece == 0, torch.full_like(piece, 1e-30), piece)
        shrunk = cutoff.shrink_(piece, offset) if cutoff.value > 0 else cutoff.shrink_(marked, offset)
        marks[offset : offset + size] = shrunk
    return np.flatnonzero(marks.numpy())


def naive(values, k):
    ranked = np.lexsort((np.arange(len(values)), -np.abs(values.numpy())))
    return np.sort(ranked[: max(0, k)])


def select(values, ks, size):
    return largest(Pieces(values, size), lambda piece: [piece.abs()], [ks], len(values))[0]


@given(
    st.lists(st.floats(-3, 3, width=32) | st.sampled_from([0.0, 0.5, -0.5, 1.0]), max_size=40),
    st.lists(st.integers(-1, 45), min_size=1, max_size=4),
    st.integers(1, 50),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_exactly_the_k_largest_first_ones_of_equal_magnitude(numbers, ks, size, dtype):
    values = torch.tensor(numbers, dtype=dtype)
    for k, cutoff in zip(ks, select(values, ks, size), strict=True):
        if cutoff.value > 0:
            np.testing.assert_array_equal(kept(values, cutoff, size), naive(values, k))
        else:  # zeros may be kept: they are indistinguishable after shrinking, so compare positive entries
            assert set(np.flatnonzero(values.numpy())) <= set(kept(values, cutoff, size))


def streams(kind, n, dtype, rng):
    if kind == "normal":
        return rng.standard_normal(n).astype(dtype)
    if kind == "rounded":  # differences of bfloat16 weights: few distinct values, many zeros
        return (np.round(rng.standard_normal(n) * 4) / 512).astype(dtype)
    if kind == "equal":
        return np.full(n, 0.25, dtype)
    if kind == "zero":
        return np.zeros(n, dtype)
    if kind == "sorted":  # samples of blocks say little
        return np.sort(rng.standard_normal(n)).astype(dtype)
    if kind == "spike":  # one block is unlike all others, and unlikely to be sampled
        values = rng.standard_normal(n).astype(dtype) * dtype(1e-3)
        values[: n // 50] = 1 + rng.random(n // 50)
        return values
    return (rng.standard_normal(n) * 10.0 ** rng.integers(-38, 38, n)).clip(-3e38, 3e38).astype(dtype)


KINDS = ("normal", "rounded", "equal", "zero", "sorted", "spike", "wild")


@pytest.mark.parametrize("radix", [11, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_selection_equals_a_stable_sort(monkeypatch, kind, dtype, radix):
    monkeypatch.setattr(selection, "SMALL", 1000)
    monkeypatch.setattr(selection, "_TAKEN", 800)
    monkeypatch.setattr(selection, "_RADIX", radix)
    values = torch.from_numpy(streams(kind, 40_000, dtype, np.random.default_rng(0)))
    ranked = np.lexsort((np.arange(values.numel()), -values.abs().numpy()))
    for k in (1, 17, 400, 8000, 20_000, 39_999):
        (cutoff,) = select(values, [k], 777)
        magnitude = values.abs().numpy()
        above = (magnitude > cutoff.value) | ((magnitude == cutoff.value) & (np.arange(values.numel()) < cutoff.index))
        np.testing.assert_array_equal(np.flatnonzero(above), np.sort(ranked[:k]))
        assert cutoff.value == magnitude[ranked[k - 1]]


@pytest.mark.parametrize("kind", ["normal", "rounded", "equal", "zero"])
def test_one_pass_is_enough_and_collects_little(monkeypatch, kind):
    monkeypatch.setattr(selection, "SMALL", 1000)
    collected = []
    part = selection._Search.part

    def watched(self, bits, bracket):
        found = part(self, bits, bracket)
        collected.append(found.inside.size)
        return found

    monkeypatch.setattr(selection._Search, "part", watched)
    values = torch.from_numpy(streams(kind, 1 << 20, np.float32, np.random.default_rng(1)))
    pieces = Pieces(values, 1 << 15)
    largest(pieces, lambda piece: [piece.abs()], [[1 << 18]], values.numel())
    assert pieces.passes == 1
    assert sum(collected) < values.numel() / 16


def test_several_scores_and_counts_in_one_pass(monkeypatch):
    monkeypatch.setattr(selection, "SMALL", 100)
    rng = np.random.default_rng(2)
    a, b = (torch.from_numpy(rng.random(5000).astype(np.float32)) for _ in range(2))
    pieces = Pieces(torch.stack([a, b], dim=1), 500)
    found = largest(pieces, lambda piece: [piece[:, 0], piece[:, 1]], [[10, 1000], [0, 2500, 5000]], 5000)
    assert [c.value for c in found[0]] == [float(a.sort(descending=True).values[k - 1]) for k in (10, 1000)]
    assert found[1][0] == Cutoff(math.inf, 0)
    assert found[1][1].value == float(b.sort(descending=True).values[2499])
    assert found[1][2] == Cutoff(0.0, 5000)


def test_mask_marks_what_is_kept():
    scores = torch.tensor([0.0, 2.0, 1.0, 1.0, 3.0])
    assert Cutoff(1.0, 3).mask(scores, 0).tolist() == [0, 1, 1, 0, 1]
    assert Cutoff(1.0, 3).mask(scores, 10).tolist() == [0, 1, 0, 0, 1]
    assert Cutoff(1.0, 13).mask(scores, 10).tolist() == [0, 1, 1, 0, 1]
    assert scores.tolist() == [0.0, 2.0, 1.0, 1.0, 3.0]


def test_nothing_and_nan_do_not_break_it():
    assert select(torch.zeros(0), [0, 3], 4) == [Cutoff(math.inf, 0), Cutoff(0.0, 0)]
    values = torch.tensor([1.0, math.nan, 2.0, 3.0])
    (cutoff,) = select(values, [2], 2)
    assert cutoff.value == 3.0


def test_pieces_of_any_size_give_the_same_cutoff():
    values = torch.from_numpy(streams("rounded", 3000, np.float32, np.random.default_rng(3)))
    cutoffs = {tuple(select(values, [5, 900], size)) for size in (1, 7, 64, 5000)}
    assert len(cutoffs) == 1
    assert all(isinstance(c.index, int) for c in itertools.chain(*cutoffs))


@pytest.mark.parametrize("share", [0.0, 1e-9, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["dense", "sparse", "sorted", "alike", "zero"])
def test_share_of_the_positive_scores(kind, share, monkeypatch):
    """Found in one pass, as if the positive scores had been counted first; two if the sample misleads."""
    monkeypatch.setattr(selection, "SMALL", 1 << 10)
    rng = np.random.default_rng(0)
    values = np.abs(rng.standard_normal(1 << 16)).astype(np.float32)
    values = {
        "dense": values,
        "sparse": values * (rng.random(len(values)) < 0.03),
        "sorted": np.sort(values) * (np.arange(len(values)) > 50000),
        "alike": np.ones_like(values),
        "zero": np.zeros_like(values),
    }[kind]
    pieces = Pieces(torch.from_numpy(values), 5000)
    found = largest_share(pieces, lambda piece: piece, share, len(values))
    passes, keep = pieces.passes, int(np.count_nonzero(values) * share)
    assert found == largest(pieces, lambda piece: [piece], [[keep]], len(values))[0][0]
    assert passes == 1 or kind == "sorted"
