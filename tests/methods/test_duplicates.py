import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import merganser as mg
from benchmarks.published import METHODS
from merganser.kernels.spectra import top_svd
from merganser.methods.duplicates import APART, SAME, Sketches, average_over_groupings, distance


def published(deltas, k):
    """TSV-Merge as it was published, in float64."""
    factors = [np.linalg.svd(delta, full_matrices=False) for delta in deltas]
    u = np.hstack([f[0][:, :k] for f in factors])
    s = np.concatenate([f[1][:k] for f in factors])
    v = np.vstack([f[2][:k] for f in factors])
    (a, _, b), (e, _, f) = (np.linalg.svd(side, full_matrices=False) for side in (u, v))
    return (a @ b * s) @ (e @ f)


def experts(count, seed, n=24):
    rng = np.random.default_rng(seed)
    q = [np.linalg.qr(rng.standard_normal((n, n)))[0] for _ in range(2 * count)]
    return [(q[2 * i] * np.linspace(1.0, 0.1, n)) @ q[2 * i + 1].T for i in range(count)], rng


def merged(deltas, method="tsv", **options):
    base = {"w": torch.zeros(deltas[0].shape, dtype=torch.float64)}
    models = [{"w": torch.from_numpy(np.ascontiguousarray(delta))} for delta in deltas]
    return mg.merge(models, method=method, base=base, **options)["w"].numpy()


def nearby(expert, size, rng):
    noise = rng.standard_normal(expert.shape)
    return expert + size * noise * np.linalg.norm(expert) / np.linalg.norm(noise)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 999), others=st.integers(0, 2))
def test_the_merge_is_continuous_in_the_distance_of_two_experts(seed, others):
    """With room for all directions, that is: where they fill the space, the polar factor itself may jump, by a sign."""
    (first, *rest), rng = experts(1 + others, seed)
    noise = rng.standard_normal(first.shape)
    noise *= np.linalg.norm(first) / np.linalg.norm(noise)
    sizes = np.r_[0, np.logspace(-6, -1, 41)]
    found = [merged([first, first + size * noise, *rest], rank_fraction=4 / 24) for size in sizes]
    scale = np.linalg.norm(found[0])
    for one, other in itertools.pairwise(found):
        assert np.linalg.norm(one - other) < 0.25 * scale
    far = np.linalg.norm(found[-1] - published([first, first + 0.1 * noise, *rest], 4))
    assert far < 1e-6 * scale
    if not others:
        truncated = top_svd(torch.from_numpy(first), 4).matrix().numpy()
        np.testing.assert_allclose(found[0], truncated, atol=1e-9)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 999), others=st.integers(0, 1))
@pytest.mark.parametrize("method", ["tsv", "iso_c", "iso_cts", "star", "svc", "wudi"])
def test_near_duplicates_count_as_one(method, seed, others):
    """The published TSV-Merge and Iso-CTS return the expert with noise of its own norm. The others do not."""
    (first, *rest), rng = experts(1 + others, seed)
    same = merged([first, first, *rest], method)
    for size in np.logspace(-6, -1, 16):
        change = np.linalg.norm(merged([first, nearby(first, size, rng), *rest], method) - same)
        if size <= SAME / 2 or method not in ("tsv", "iso_cts"):
            assert change < 10 * size * np.linalg.norm(same)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 999), others=st.integers(0, 1))
def test_iso_cts_tells_experts_apart_by_their_own_distance(seed, others):
    """Not by that of what common directions leave of them, where the same difference is many times larger."""
    (first, *rest), rng = experts(1 + others, seed)
    same = merged([first, first, *rest], "iso_cts")
    found = [merged([first, nearby(first, size, rng), *rest], "iso_cts") for size in (0.8 * SAME, 3e-3, 1.3 * APART)]
    below, between, above = (np.linalg.norm(one - same) / np.linalg.norm(same) for one in found)
    assert below < 10 * SAME
    assert 1.3 * below < between < 0.85 * above


def test_iso_cts_of_experts_further_apart_is_as_published():
    (first, second), rng = experts(2, 4)
    deltas = [first, nearby(first, 1.3 * APART, rng), second]
    expected = METHODS["iso_cts"]([torch.from_numpy(delta) for delta in deltas])
    np.testing.assert_allclose(merged(deltas, "iso_cts"), expected, atol=1e-6)


def test_sketches_estimate_distances():
    (first, second), rng = experts(2, 6, n=96)
    sketches = Sketches()
    near = nearby(first, 3e-3, rng)
    corner = first.copy()
    corner[0, 0] += 3e-3 * np.linalg.norm(first)
    for matrix in (first, near, 5 * near, corner, second, 0 * first):
        sketches.add(torch.from_numpy(matrix))
    for other in (1, 2, 3):
        assert sketches.distance(0, other) == pytest.approx(3e-3, rel=0.3)
    assert sketches.distance(1, 2) < 1e-12
    assert sketches.distance(0, 4) > 1
    assert sketches.distance(0, 5) == 2


def test_experts_further_apart_are_merged_as_published():
    for seed in range(3):
        (first, second), rng = experts(2, seed)
        deltas = [first, nearby(first, 0.05, rng), second]
        np.testing.assert_allclose(merged(deltas), published(deltas, 8), atol=1e-7)


def test_weights_do_not_tell_duplicates_apart():
    (first,), _ = experts(1, 5)
    np.testing.assert_allclose(merged([first, first], weight=[1.0, 0.5]), 0.75 * merged([first, first]), atol=1e-9)


def test_distance_is_that_of_normalised_matrices():
    (first, second), rng = experts(2, 0)
    for other in (nearby(first, 1e-4, rng), 3 * nearby(first, 5e-3, rng)):
        a, b = (top_svd(torch.from_numpy(m), 24) for m in (first, other))
        wanted = np.linalg.norm(first / np.linalg.norm(first) - other / np.linalg.norm(other))
        assert distance(a, b) == pytest.approx(wanted, rel=1e-3)
    assert distance(*(top_svd(torch.from_numpy(m), 24) for m in (first, second))) >= APART
    assert distance(a, top_svd(torch.zeros(24, 24), 24)) >= APART


def test_groups_are_joined_in_the_order_of_their_distances():
    """Two pairs at different distances: every threshold sees its own grouping."""
    (first, second), rng = experts(2, 1)
    between = (SAME * APART) ** 0.5
    matrices = [first, nearby(first, 1e-5, rng), second, nearby(second, between, rng)]
    factors = [top_svd(torch.from_numpy(matrix), 6) for matrix in matrices]
    seen = []
    average_over_groupings(factors, lambda parts: seen.append([id(p) for p in parts]) or torch.zeros(24, 24))
    assert [len(set(parts)) for parts in seen] == [3, 2]
