import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.errors import MerganserError
from merganser.kernels.polar import passband, polar, polar_and_norm
from merganser.kernels.spectra import (
    RANK_FLOOR,
    SMALL,
    Factors,
    beside,
    effective_rank,
    gram,
    mirror,
    randomized_svd,
    spectrum,
    spectrum_and_svd,
    top_svd,
    top_svds,
)


def matrix_with(values, d, m, seed=0):
    rng = np.random.default_rng(seed)
    n = len(values)
    u, v = (np.linalg.qr(rng.standard_normal((size, n)))[0] for size in (d, m))
    return torch.from_numpy((u * np.asarray(values, dtype=np.float64)) @ v.T)


def assert_top_svd(found: Factors, matrix, k):
    u, s, vt = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    rank = min(k, int((s > RANK_FLOOR * s[0]).sum()))
    assert found.rank == rank
    np.testing.assert_allclose(found.s, s[:rank], atol=1e-11 * s[0])
    for factor in (found.u, found.v):
        np.testing.assert_allclose(factor.T @ factor, np.eye(rank), atol=1e-9 + 1e-15 * s[0] / s[rank - 1])
    # A cut between distinct singular values makes the truncation unique, whatever the signs.
    if rank == len(s) or s[rank - 1] - s[rank] > 1e-3 * s[0]:
        np.testing.assert_allclose(found.matrix(), (u[:, :rank] * s[:rank]) @ vt[:rank], atol=1e-9 * s[0])


@settings(max_examples=40, deadline=None)
@given(
    d=st.integers(1, 90),
    m=st.integers(1, 90),
    share=st.floats(0.01, 1.0),
    decades=st.floats(0, 9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_top_svd_is_the_svd(d, m, share, decades, dtype, seed):
    n = min(d, m)
    k = max(1, int(share * n))
    matrix = matrix_with(np.logspace(0, -decades, n), d, m, seed).to(dtype)
    found = top_svd(matrix, k)
    s = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    np.testing.assert_allclose(found.s, s[: found.rank], atol=1e-11 * s[0])
    residual = matrix.double() - found.matrix()
    np.testing.assert_allclose(np.linalg.norm(residual), np.linalg.norm(s[found.rank :]), atol=1e-9 * s[0])


@pytest.mark.parametrize("shape", [(300, 80), (80, 300), (120, 120)])
@pytest.mark.parametrize(
    "values",
    [
        np.logspace(0, -1, 80),
        np.logspace(0, -10, 80),
        np.r_[np.logspace(0, -2, 12), np.zeros(68)],
        np.r_[3.0, np.ones(79)],
    ],
    ids=["gentle", "ten decades", "rank 12", "repeated"],
)
@pytest.mark.parametrize("k", [1, 10, 80])
def test_top_svd_across_spectra(shape, values, k):
    matrix = matrix_with(values, *shape)
    assert_top_svd(top_svd(matrix, k), matrix, k)


def test_top_svd_leaves_its_input_alone_and_takes_strided_ones():
    matrix = torch.randn(100, 160, generator=torch.Generator().manual_seed(0)).T
    before = matrix.clone()
    assert_top_svd(top_svd(matrix, 5), matrix, 5)
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("shape", [(3, 2), (SMALL + 60, SMALL + 20)])
def test_zero_matrices_have_no_components(shape):
    assert top_svd(torch.zeros(shape), 2).rank == 0
    assert spectrum(torch.zeros(shape)).sum() == 0
    assert polar(torch.zeros(shape)).abs().max() == 0


@pytest.mark.parametrize("shape", [(3, 2), (SMALL + 60, SMALL + 20)])
def test_undefined_entries_are_an_error(shape):
    matrix = torch.zeros(shape)
    matrix[0, 0] = torch.nan
    for function in (lambda: top_svd(matrix, 2), lambda: spectrum(matrix), lambda: polar(matrix)):
        with pytest.raises(MerganserError, match="infinite or undefined"):
            function()


@pytest.mark.parametrize("shape", [(20, 12), (90, 50)])
def test_batches_equal_single_calls(shape):
    matrices = [matrix_with(np.logspace(0, -2, min(shape)), *shape, seed) for seed in range(3)]
    for batched, matrix in zip(top_svds(matrices, 4), matrices, strict=True):
        assert_top_svd(batched, matrix, 4)


def test_gram_streams_over_rows(monkeypatch):
    matrix = torch.randn(57, 9, generator=torch.Generator().manual_seed(1))
    whole = np.tril(matrix.double().numpy().T @ matrix.double().numpy())
    monkeypatch.setattr("merganser.kernels.spectra._BLOCK_ELEMENTS", 40)
    np.testing.assert_allclose(np.tril(gram(matrix)), whole, rtol=1e-13)
    basis = torch.linalg.qr(torch.randn(9, 2, dtype=torch.float64)).Q
    deflated = matrix.double() - matrix.double() @ basis @ basis.T
    np.testing.assert_allclose(np.tril(gram(matrix, basis)), np.tril(deflated.T @ deflated), atol=1e-12)


def test_spectrum_and_effective_rank():
    values = np.logspace(0, -7, 60)
    matrix = matrix_with(values, 90, 60)
    np.testing.assert_allclose(spectrum(matrix), values, atol=2e-8)
    assert effective_rank(torch.ones(7)) == pytest.approx(7)
    assert effective_rank(torch.tensor([2.0, 0.0])) == pytest.approx(1)
    assert effective_rank(torch.zeros(3)) == 0


@settings(max_examples=25, deadline=None)
@given(d=st.integers(1, 60), m=st.integers(1, 60), seed=st.integers(0, 99))
def test_polar_is_the_procrustes_solution_above_the_tolerance(d, m, seed):
    matrix = matrix_with(np.logspace(0, -3, min(d, m)), d, m, seed)
    u, _, vt = np.linalg.svd(matrix.numpy(), full_matrices=False)
    np.testing.assert_allclose(polar(matrix), u @ vt, atol=1e-7)


def test_polar_is_a_partial_isometry_where_rank_is_lost():
    matrix = matrix_with([1.0, 0.5, 0.2, 1e-9, 0.0], 40, 5)
    u, _, vt = np.linalg.svd(matrix.numpy(), full_matrices=False)
    found = polar(matrix)
    np.testing.assert_allclose(found, u[:, :3] @ vt[:3], atol=1e-8)
    np.testing.assert_allclose(found @ found.T @ found, found, atol=1e-8)


def test_polar_moves_continuously_through_the_tolerance():
    factors = [polar(matrix_with([1.0, x], 30, 2)) for x in np.logspace(-6, -3, 400)]
    jumps = [float((b - a).norm()) for a, b in itertools.pairwise(factors)]
    assert max(jumps) < 0.02
    assert float(factors[-1].norm()) == pytest.approx(2**0.5, abs=1e-6)
    assert float(factors[0].norm()) == pytest.approx(1, abs=1e-6)


def test_passband_ends():
    x = torch.tensor([0.0, 1e-5, 1e-4, 1.0], dtype=torch.float64)
    assert passband(x, 1e-4).tolist() == pytest.approx([0, 0, 1, 1])
    assert passband(x, 0.0).tolist() == [0, 1, 1, 1]
    assert passband(x, 1e-4, "whiten").tolist() == pytest.approx([0, 0.0995, 0.7071, 1], abs=1e-4)


def test_whitening_is_the_ridge_inverse_root():
    matrix = matrix_with([2.0, 1.0, 1e-3], 20, 3)
    values, w = np.linalg.eigh((matrix.T @ matrix).numpy() + (1e-2 * 2.0) ** 2 * np.eye(3))
    root = (w / np.sqrt(values)) @ w.T
    np.testing.assert_allclose(polar(matrix, 1e-2, "whiten"), matrix.numpy() @ root, rtol=1e-6, atol=1e-9)


def test_polar_comes_with_the_nuclear_norm():
    factor, norm = polar_and_norm(matrix_with([2.0, 1.0, 0.5], 6, 90))
    assert factor.shape == (6, 90)
    assert norm == pytest.approx(3.5)


def test_randomized_svd_keeps_almost_all_the_energy():
    matrix = matrix_with(1 / np.arange(1, 121), 200, 120).float()
    best = float(top_svd(matrix, 20).s.square().sum())
    found = randomized_svd(matrix.T, 20, seed=3)
    assert float(found.s.square().sum()) >= 0.99 * best
    np.testing.assert_allclose(found.u.T @ found.u, np.eye(20), atol=1e-10)
    assert torch.equal(found.u, randomized_svd(matrix.T, 20, seed=3).u)


def test_gram_of_rows_and_columns_that_share_memory():
    line = torch.randn(1, 40, dtype=torch.float64)
    for matrix in (line.expand(50, 40), line.T.expand(40, 50), torch.randn(90, dtype=torch.float64).unfold(0, 50, 1)):
        dense = matrix.numpy().copy()
        np.testing.assert_allclose(np.tril(gram(matrix)), np.tril(dense.T @ dense), rtol=1e-12)


@pytest.mark.parametrize("shape", [(40, 20), (20, 40), (90, 60), (60, 90), (200, 64)])
@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("rank", [None, 5])
def test_spectrum_and_factors_from_one_decomposition(shape, share, rank):
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal(shape)
    if rank is not None:
        matrix = rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))
    k = max(1, int(share * min(shape)))
    values, factors = spectrum_and_svd(torch.from_numpy(matrix), k)
    expected = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(values, expected, atol=2e-7 * expected[0])
    alone = top_svd(torch.from_numpy(matrix), k)
    assert factors.rank == alone.rank
    np.testing.assert_allclose(factors.matrix(), alone.matrix(), atol=1e-9 * expected[0])
    np.testing.assert_allclose(factors.s, alone.s, rtol=1e-9)


@pytest.mark.parametrize("n", [0, 1, 255, 256, 600])
def test_mirror_fills_the_upper_triangle(n):
    lower = torch.randn(n, n)
    wanted = lower.tril() + lower.tril(-1).T
    assert torch.equal(mirror(lower), wanted)
    assert torch.equal(lower, wanted)


def test_factors_that_lie_side_by_side_are_not_copied():
    place = torch.randn(3, 2, 5)
    parts = [part.T for part in place]
    whole = beside(*parts)
    assert whole.data_ptr() == place.data_ptr()
    for found in (whole, beside(*(part.clone() for part in parts)), beside(parts[0], *parts[1:])):
        np.testing.assert_array_equal(found, torch.cat(parts, dim=1))
    np.testing.assert_array_equal(beside(parts[0], parts[2]), torch.cat([parts[0], parts[2]], dim=1))
