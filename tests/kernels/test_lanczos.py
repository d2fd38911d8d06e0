import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merganser.kernels import lanczos, leading
from merganser.kernels.lanczos import leading_eigenpairs
from merganser.kernels.leading import LARGE, RESOLVED, leading_svd

ERROR = 1e-4


def gram_with(singular, seed=0):
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((len(singular), len(singular))))
    return torch.from_numpy((q * np.square(singular)) @ q.T).float()


@given(
    k=st.integers(1, 24),
    exponent=st.floats(0.3, 2.0),
    rank=st.integers(100, 256),
    seed=st.integers(0, 100),
)
def test_it_finds_the_leading_pairs_or_nothing(k, exponent, rank, seed):
    singular = np.arange(1, 257) ** -exponent * (np.arange(256) < rank)
    gram = gram_with(singular, seed)
    found = leading_eigenpairs(gram, k + 10, k, ERROR, 1e-7)
    if found is None:
        return
    values, vectors = found
    np.testing.assert_allclose(values[:k], np.square(singular[:k]), rtol=1e-3)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(k + 10), atol=1e-5)
    exact = np.linalg.eigh(gram.double().numpy())[1][:, ::-1][:, :k]
    outside = exact - vectors.double().numpy() @ (vectors.double().numpy().T @ exact)
    assert np.linalg.norm(outside * singular[:k]) < 3 * ERROR * np.linalg.norm(singular[:k])


def test_a_decaying_spectrum_is_found():
    assert leading_eigenpairs(gram_with(np.arange(1, 513) ** -0.7), 80, 64, ERROR, 1e-7) is not None


@pytest.mark.parametrize("rank", [1, 5, 30, 100])
def test_an_exhausted_space_keeps_an_orthonormal_basis(rank):
    gram = gram_with(np.linspace(2, 1, 256) * (np.arange(256) < rank))
    found = leading_eigenpairs(gram, 60, 40, ERROR, 1e-4)
    assert found is not None or rank == 100
    if found is not None:
        values, vectors = found
        assert (values[-1] <= 1e-4 * values[0]) == (rank < 60)
        np.testing.assert_allclose(vectors.T @ vectors, np.eye(60), atol=1e-5)
        np.testing.assert_allclose(
            values[:40].sum(), np.square(np.linspace(2, 1, 256)[: min(40, rank)]).sum(), rtol=1e-4
        )


def test_eigenvalues_that_lie_too_close_are_not_found():
    assert leading_eigenpairs(torch.eye(256), 60, 40, ERROR, 1e-4) is None


def test_it_is_used_for_a_small_share_of_the_spectrum_alone(monkeypatch):
    used = []
    monkeypatch.setattr(lanczos, "leading_eigenpairs", lambda gram, *rest: used.append(rest))
    rng = np.random.default_rng(0)
    matrix = torch.from_numpy(rng.standard_normal((LARGE, LARGE)) * np.arange(1, LARGE + 1) ** -0.7).float()
    leading_svd(matrix, LARGE // 8 + 1)
    assert not used
    found = leading_svd(matrix, LARGE // 8)
    assert used == [(LARGE // 8 + 17, LARGE // 8, leading.ERROR, RESOLVED)]
    exact = np.linalg.svd(matrix.double().numpy(), compute_uv=False)  # the dense route took over
    np.testing.assert_allclose(found.s, exact[: LARGE // 8], rtol=1e-4)


@pytest.mark.parametrize("shape", [(LARGE, 700), (2 * LARGE, LARGE)])
def test_a_degenerate_cut_keeps_the_energy(shape):
    """Where σ_k = σ_{k+1}, any of the directions is right, and the truncated matrix is as near as the best one."""
    rng = np.random.default_rng(1)
    u, _, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    singular = np.arange(1, LARGE + 1) ** -0.7
    singular[40:60] = singular[50]
    matrix = torch.from_numpy((u * singular) @ vt).float()
    found = leading_svd(matrix, 50)
    rest = np.linalg.norm(matrix.double() - found.matrix().double())
    np.testing.assert_allclose(rest, np.linalg.norm(singular[50:]), rtol=1e-4)


@pytest.mark.parametrize("copies", [15, 17, 20, 40])
def test_no_copy_of_a_repeated_singular_value_is_missed(copies):
    """A block of 16 columns finds 16 of them, and residuals do not show the others."""
    s = torch.exp(-(torch.arange(640) // copies).double() / 2) + 1e-4
    left, right = (torch.linalg.qr(torch.randn(n, 640, dtype=torch.float64)).Q for n in (700, 640))
    matrix = ((left * s) @ right.T).float()
    torch.testing.assert_close(leading_svd(matrix, 20).s.double(), s[:20], rtol=1e-4, atol=0)
