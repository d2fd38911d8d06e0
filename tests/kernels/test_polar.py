import numpy as np
import pytest
import torch
from scipy.linalg import eigh_tridiagonal

from merganser.kernels.polar import (
    DEFECT,
    SENSITIVITY,
    TOLERANCE,
    IllConditioned,
    _defect,
    inverse_root,
    noise_levels,
    passband,
    polar,
)


def with_weak(n, weak, size, rows=None):
    """A matrix with `weak` singular values of `size` among ordinary ones, and its Procrustes solution."""
    rng = np.random.default_rng(0)
    u = np.linalg.qr(rng.standard_normal((rows or n, n)))[0]
    v = np.linalg.qr(rng.standard_normal((n, n)))[0]
    values = np.r_[np.linspace(1, 0.2, n - weak), np.full(weak, size)]
    return torch.from_numpy((u * values) @ v.T), u @ v.T


@pytest.mark.parametrize("size", [1e-5, 3e-6, 6e-7])
def test_a_single_weak_direction_of_a_square_matrix_is_kept(size):
    """Chance makes one of that size in about n·size of the cases; below 1e-5 they used to be lost."""
    matrix, wanted = with_weak(400, 1, size)
    # Without the direction, entries would be off by 1/400; how exact they are depends on the processor.
    np.testing.assert_allclose(polar(matrix), wanted, atol=1e-4)


@pytest.mark.parametrize(("weak", "rows"), [(200, 400), (1, 1600)])
def test_directions_that_noise_could_have_made_are_left_out(weak, rows):
    """Many weak directions, or one in a space with much room, are what noise makes."""
    matrix, wanted = with_weak(400, weak, 0.05 * TOLERANCE, rows)
    lost = np.linalg.norm(polar(matrix).numpy() - wanted) ** 2
    assert lost == pytest.approx(weak, rel=1e-6)


def values_of_a_random_square(n, rng):
    """Singular values like those of a Gaussian matrix of order n, relative to the largest: the eight least are exact.

    It is bidiagonal in some bases, with independent entries of χ distributions (Dumitriu and Edelman 2002).
    """
    between = np.empty(2 * n - 1)
    between[0::2] = np.sqrt(rng.chisquare(np.arange(n, 0, -1)))
    between[1::2] = np.sqrt(rng.chisquare(np.arange(n - 1, 0, -1)))
    least = eigh_tridiagonal(np.zeros(2 * n), between, eigvals_only=True, select="i", select_range=(n, n + 7))
    x = torch.ones(n, dtype=torch.float64)
    x[-8:] = torch.from_numpy(least[::-1] / (2 * n**0.5))
    return x


def test_chance_takes_no_direction_from_large_squares():
    """A cut at the tolerance would take one from 4 % of the squares of order 2048 and from 12 % of those of 4096."""
    rng = np.random.default_rng(0)
    spectra = [values_of_a_random_square(2048, rng) for _ in range(60)]
    assert any(bool((x < TOLERANCE).any()) for x in spectra)
    assert all(bool((passband(x, noise_levels(x, len(x))) == 1).all()) for x in spectra)


def test_noise_stays_below_its_level():
    """The singular values of noise in a rank-deficient matrix are of the size that is foretold."""
    rng = np.random.default_rng(1)
    for rows, n, rank in ((300, 300, 150), (300, 300, 299), (900, 300, 200)):
        u = np.linalg.qr(rng.standard_normal((rows, n)))[0][:, :rank]
        v = np.linalg.qr(rng.standard_normal((n, n)))[0][:, :rank]
        noise = 1e-4 * rng.standard_normal((rows, n)) / rows**0.5
        s = np.linalg.svd(u @ v.T + noise, compute_uv=False)
        levels = noise_levels(torch.from_numpy(s / s[0]), rows, 1e-3)
        assert (s[rank:] < levels[rank:].numpy()).all()


def test_levels_change_smoothly_with_the_spectrum():
    before = None
    for gap in np.linspace(0, 1, 101):
        x = torch.tensor([1.0, 0.5, 1e-6 * (1 + gap), 1e-6], dtype=torch.float64)
        levels = noise_levels(x, 4, 1e-4)
        if before is not None:
            np.testing.assert_allclose(levels, before, rtol=0.02)
        before = levels


def subspaces(d, k, count, seed=0):
    """Orthonormal bases side by side, as those of tasks are: square, they leave a few weak directions."""
    rng = np.random.default_rng(seed)
    bases = [np.linalg.qr(rng.standard_normal((d, k)))[0] for _ in range(count)]
    return torch.from_numpy(np.concatenate(bases, axis=1)).float()


def polar_in_float32(matrix):
    root = inverse_root(matrix)
    return root, root.polar_factor(matrix, root.precision(torch.float32)).double()


@pytest.mark.parametrize(("rows", "seed"), [(512, 0), (512, 1), (700, 0), (1024, 0)])
def test_large_float32_matrices_have_the_polar_factor_of_float64(rows, seed):
    """Chance may leave a direction of a square one that is too weak for float32."""
    matrix = subspaces(rows, 64, 8, seed)
    root, found = polar_in_float32(matrix)
    assert rows == 512 or root.vectors.dtype == torch.float32
    u, s, vt = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    assert np.linalg.norm(found.numpy() - u @ vt) < DEFECT * np.linalg.norm(u @ vt)
    np.testing.assert_allclose(root.s, s, rtol=1e-3)


def test_directions_that_float32_cannot_tell_from_zero_are_dropped_as_in_float64():
    matrix = subspaces(600, 64, 8)
    matrix[:, 500:] = matrix[:, :12]
    root, found = polar_in_float32(matrix)
    assert int((root.weights == 0).sum()) == 12
    wanted = polar(matrix.double())
    assert float((found - wanted).norm() / wanted.norm()) < DEFECT


@pytest.mark.parametrize("change", [1e-2, 1e-4, 1e-6])
def test_many_weak_directions_are_decomposed_in_float64(change):
    matrix = subspaces(600, 128, 4)
    rng = np.random.default_rng(1)
    matrix[:, 128:256] = matrix[:, :128] + change / 600**0.5 * torch.from_numpy(rng.standard_normal((600, 128))).float()
    root, found = polar_in_float32(matrix)
    assert root.vectors.dtype == torch.float64
    wanted = polar(matrix.double())
    assert float((found - wanted).norm() / wanted.norm()) < DEFECT


def test_a_wrong_root_is_noticed():
    matrix = subspaces(700, 64, 8)
    root = inverse_root(matrix)
    assert _defect(matrix, root) < DEFECT
    assert _defect(matrix, root._replace(s=root.s * 1.001, weights=root.weights / 1.001)) > DEFECT
    assert _defect(matrix, root._replace(vectors=root.vectors.roll(1, 1))) > DEFECT


@pytest.mark.parametrize("rows", [128, 200])
def test_sensitivity_is_what_an_error_of_the_matrix_does_to_its_polar_factor(rows):
    """Independent subspaces amplify errors by about two, however weak chance makes a direction of a square matrix."""
    matrix = subspaces(rows, 16, 8).double()
    noise = torch.randn(matrix.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise *= 1e-7 * matrix.norm() / noise.norm()
    before = polar(matrix)
    measured = float((polar(matrix + noise) - before).norm() / before.norm()) / 1e-7
    assert inverse_root(matrix).sensitivity(rows) == pytest.approx(measured, rel=0.4)


def test_a_direction_that_chance_made_weak_does_not_ask_for_float64():
    """Errors of the other directions do not reach it, and it is computed in float64 by itself."""
    u, s, vt = np.linalg.svd(subspaces(512, 64, 8).double().numpy())
    s[-1] = 3e-5
    matrix = torch.from_numpy((u * s) @ vt).float()
    root, found = polar_in_float32(matrix)
    assert root.vectors.dtype == torch.float32
    assert root.mean_amplification > 300
    assert root.sensitivity(512) < SENSITIVITY
    u, _, vt = np.linalg.svd(matrix.double().numpy())
    assert np.linalg.norm(found.numpy() - u @ vt) < DEFECT / 4 * 512**0.5
    right = torch.randn(512, 40, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(root.polar_factor_times(matrix, right), found @ right.double(), atol=1e-4)


def test_near_duplicates_are_ill_conditioned():
    matrix = subspaces(600, 64, 8)
    matrix[:, :64] = matrix[:, 64:128] + 1e-2 * matrix[:, :64]
    with pytest.raises(IllConditioned):
        polar(matrix, limit=SENSITIVITY)
