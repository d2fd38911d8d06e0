import numpy as np
import pytest
import torch

from merganser.kernels import leading
from merganser.kernels.lapack import eigenvalues_and_leading_vectors, leading_eigenpairs
from merganser.kernels.leading import ERROR, LARGE, leading_svd, spectrum_and_leading_svd
from merganser.kernels.spectra import spectrum_and_svd, top_svd


def power_law(d, m, exponent=0.7, seed=0):
    rng = np.random.default_rng(seed)
    n = min(d, m)
    signal = (rng.standard_normal((d, n)) * np.arange(1, n + 1) ** -exponent) @ rng.standard_normal((n, m))
    return torch.from_numpy(1e-3 * signal / n**0.5).float()


def truncation(matrix, k):
    u, s, vt = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    return (u[:, :k] * s[:k]) @ vt[:k]


@pytest.mark.parametrize("shape", [(LARGE, LARGE), (900, LARGE), (LARGE, 900)])
@pytest.mark.parametrize("k", [5, 64, 200])
def test_leading_svd_is_the_truncated_svd(shape, k):
    matrix = power_law(*shape)
    found = leading_svd(matrix, k)
    assert found.u.dtype == torch.float32
    assert found.rank == k
    wanted = truncation(matrix, k)
    assert np.linalg.norm(found.matrix().numpy() - wanted) < 2 * ERROR * np.linalg.norm(wanted)
    for factor in (found.u, found.v):
        np.testing.assert_allclose(factor.T @ factor, np.eye(k), atol=2e-6)


def test_the_measured_error_is_that_of_the_truncation(monkeypatch):
    """The estimate is neither far below the error it stands for nor useless."""
    estimates = []
    measure = leading._error
    monkeypatch.setattr(leading, "_error", lambda *args: estimates.append(measure(*args)) or estimates[-1])
    for seed in range(4):
        matrix = power_law(700, LARGE, seed=seed)
        wanted = truncation(matrix, 64)
        error = np.linalg.norm(leading_svd(matrix, 64).matrix().numpy() - wanted) / np.linalg.norm(wanted)
        assert error / 3 < estimates[-1] < 1e-4


@pytest.mark.parametrize("broken", [lambda u: u * 1.01, lambda u: u + 1e-3 * torch.ones_like(u) / len(u) ** 0.5])
def test_vectors_that_are_off_are_noticed(broken):
    matrix = power_law(700, LARGE)
    found = leading_svd(matrix, 64)
    assert leading._error(matrix, found._replace(u=broken(found.u)), found.s[-1].double() * 0.9) > ERROR


@pytest.mark.parametrize(
    "matrix",
    [
        power_law(LARGE - 1, 700),
        power_law(LARGE, 700).double(),
        torch.cat([power_law(LARGE, 16), torch.zeros(LARGE, LARGE)], dim=1),
        torch.eye(LARGE),
        power_law(LARGE, LARGE) * 1e-20,
        torch.zeros(LARGE, LARGE),
    ],
    ids=["small", "float64", "rank 16", "flat", "tiny entries", "zero"],
)
def test_what_float32_cannot_resolve_is_decomposed_in_float64(matrix):
    for found, exact in (
        (leading_svd(matrix, 64), top_svd(matrix, 64)),
        (spectrum_and_leading_svd(matrix, 64)[1], spectrum_and_svd(matrix, 64)[1]),
    ):
        if matrix.equal(torch.eye(LARGE)):  # any vectors are right; measurements may take those of float32
            np.testing.assert_allclose(found.s, exact.s, rtol=1e-6)
            continue
        assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))


def test_spectrum_keeps_three_digits():
    for exponent in (0.0, 0.7, 1.2, 3.0):
        matrix = power_law(600, LARGE, exponent)
        values, factors = spectrum_and_leading_svd(matrix, 100)
        wanted = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
        np.testing.assert_allclose(values.sum(), wanted.sum(), rtol=1e-3)
        np.testing.assert_allclose(values.square().sum(), (wanted**2).sum(), rtol=1e-5)
        np.testing.assert_allclose(factors.s, wanted[:100], rtol=1e-3)


def test_eigenpairs_in_float32():
    a = np.random.default_rng(0).standard_normal((90, 60))
    matrix = torch.from_numpy(a.T @ a)
    wanted = np.linalg.eigvalsh(matrix)[::-1]
    for k in (7, 60):
        for values, vectors in (
            leading_eigenpairs(matrix.float(), k),
            eigenvalues_and_leading_vectors(matrix.float(), k),
        ):
            assert values.dtype == vectors.dtype == torch.float32
            np.testing.assert_allclose(values, wanted[: len(values)], atol=1e-5 * wanted[0])
            np.testing.assert_allclose(matrix @ vectors.double(), vectors.numpy() * wanted[:k], atol=1e-5 * wanted[0])


def test_a_power_step_lowers_the_error(monkeypatch):
    matrix = power_law(700, LARGE) + 0.03 * power_law(700, LARGE, 0.0, seed=1)
    estimates = []
    measure = leading._error
    monkeypatch.setattr(leading, "_error", lambda *args: estimates.append(measure(*args)) or estimates[-1])
    leading_svd(matrix, 100)
    first = estimates[-1]
    monkeypatch.setattr(leading, "ERROR", 0.9 * first)
    found = leading_svd(matrix, 100)
    assert found.u.dtype == torch.float32
    assert estimates[-1] < 0.9 * first
    wanted = truncation(matrix, 100)
    assert np.linalg.norm(found.matrix().numpy() - wanted) < estimates[-1] * np.linalg.norm(wanted)
    monkeypatch.setattr(leading, "STEPS", 0)
    assert leading_svd(matrix, 100).u.dtype == torch.float64
