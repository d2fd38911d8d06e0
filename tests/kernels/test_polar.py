import numpy as np
import pytest
import torch

from merganser.kernels.polar import TOLERANCE, noise_levels, polar


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
    np.testing.assert_allclose(polar(matrix), wanted, atol=1e-6)


@pytest.mark.parametrize(("weak", "rows"), [(200, 400), (1, 1600)])
def test_directions_that_noise_could_have_made_are_left_out(weak, rows):
    """Many weak directions, or one in a space with much room, are what noise makes."""
    matrix, wanted = with_weak(400, weak, 0.05 * TOLERANCE, rows)
    lost = np.linalg.norm(polar(matrix).numpy() - wanted) ** 2
    assert lost == pytest.approx(weak, rel=1e-6)


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
