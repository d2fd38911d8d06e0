"""Leading singular triplets of large matrices in float32, with a measured error and a float64 fallback.

If only the top k of n components are wanted, the Gram matrix of float32 weights and its eigenvectors need only float32:
half the bytes, twice the speed. k + p eigenvectors are computed, for small k by products with the Gram matrix
(`merganser.kernels.lanczos`), and a Rayleigh–Ritz step in float64 corrects the
mixing among them. The mixing with the remaining ones is measured: with r_i = Aᵀu_i − σ_i v_i, the error of the
truncated matrix is

    e = ‖R D‖_F / ‖Σ_k‖_F,   D_ii = σ_i² / (σ_i² − σ_{k+p+1}²),

to first order (Wedin). A few random probes estimate ‖R D‖_F at the cost of a few matrix-vector products. Above `ERROR`
a power step V ← AᵀU Σ⁻¹, which shrinks the part of direction j in v_i by σ_j²/σ_i², and another Rayleigh–Ritz step
follow: rounding grows with the side of a matrix, and from about 2048 on one such step is often needed. If `STEPS` of
them are not enough, `merganser.kernels.spectra` computes the result in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.kernels import lanczos, spectra
from merganser.kernels.spectra import Factors, product
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Side from which float32 pays; smaller matrices are decomposed in float64.
LARGE = 512
#: Largest allowed relative error of a truncated matrix. Orthogonalising may multiply it by about seven.
ERROR = 1.5e-5
#: Power steps before float32 is given up.
STEPS = 4
#: Relative rounding of the eigenvalues of a float32 Gram matrix.
ROUNDING = 4e-7
#: Smallest share of σ₁² whose singular vectors a float32 Gram matrix resolves.
RESOLVED = 250 * ROUNDING
_PROBES = 8
#: Norms whose squares fit into float32.
_RANGE = (1e-12, 1e12)


def leading_svd(matrix: Tensor, k: int) -> Factors:
    """Return the k leading singular triplets, in float32 if the error stays below `ERROR`, otherwise in float64.

    Args:
        matrix: The matrix; only float32 matrices on the CPU use the fast path.
        k: The number of triplets.

    Returns:
        Factors as `spectra.top_svd` returns them, in float32 or float64.

    Example:
        >>> leading_svd(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 2).s
        tensor([3., 2.], dtype=torch.float64)
    """
    if matrix.shape[0] < matrix.shape[1]:
        return leading_svd(matrix.T, k).T
    width = with_margin(k)
    if not _is_large(matrix) or 2 * width >= matrix.shape[1] or (found := _leading(matrix, width + 1, k)) is None:
        return spectra.top_svd(matrix, k)
    values, basis = found[0], found[1][:, :width]
    for _ in range(1 + STEPS):
        factors = _rayleigh_ritz(matrix, basis)
        if _error(matrix, leading := factors.truncate(k), values[width]) <= ERROR:
            return Factors(*(part.clone() for part in leading))  # not views that keep the rest in memory
        basis = (product(factors.u.T, matrix) / factors.s[:, None]).T
    return spectra.top_svd(matrix, k)


def spectrum_and_leading_svd(matrix: Tensor, k: int) -> tuple[Tensor, Factors]:
    """Return all singular values and the k leading triplets, for measurements that need three digits.

    Uses float32 if the components are well above its rounding: singular vectors are then accurate to about 1e-3, and
    sums of singular values and of their squares to better than that. Otherwise uses float64.

    Args:
        matrix: The matrix; only float32 matrices on the CPU use the fast path.
        k: The number of triplets.

    Returns:
        The singular values, descending, and the factors.

    Example:
        >>> spectrum_and_leading_svd(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 1)[0]
        tensor([3., 2., 1.], dtype=torch.float64)
    """
    if matrix.shape[0] < matrix.shape[1]:
        values, factors = spectrum_and_leading_svd(matrix.T, k)
        return values, factors.T
    k = min(k, matrix.shape[1])
    found = _eigenvectors(matrix, k) if _is_large(matrix) else None
    if found is None or _uncertainty(found[0]) > 1e-3:
        return spectra.spectrum_and_svd(matrix, k)
    values, basis = found
    image = product(basis.T, matrix.T).T
    s = torch.linalg.vector_norm(image, dim=0)
    return values, Factors(image / s, s, basis)


def with_margin(k: int) -> int:
    """Return how many singular vectors are computed for the first k of them to be corrected."""
    return k + max(16, k // 4)


def _is_large(matrix: Tensor) -> bool:
    if min(matrix.shape) < LARGE or matrix.dtype != torch.float32 or matrix.device.type != "cpu":
        return False
    return _RANGE[0] < float(matrix.norm()) < _RANGE[1]


def _leading(matrix: Tensor, width: int, k: int) -> tuple[Tensor, Tensor] | None:
    """Return singular values and right singular vectors, so many that the first k can be corrected, or None if
    float32 cannot resolve the last.
    """
    from merganser.kernels.lapack import leading_eigenpairs

    gram = spectra.gram(matrix, dtype=torch.float32)
    found = None
    if k <= lanczos.SHARE * matrix.shape[1]:
        found = lanczos.leading_eigenpairs(spectra.mirror(gram), width, k, ERROR, RESOLVED)
    squares, basis = found or leading_eigenpairs(gram, width, overwrite=True)
    return (squares.double().sqrt(), basis) if bool(squares[-1] > RESOLVED * squares[0]) else None


def _eigenvectors(matrix: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """Return all singular values and k right singular vectors, or None if float32 cannot resolve the last."""
    from merganser.kernels.lapack import eigenvalues_and_leading_vectors

    squares, basis = eigenvalues_and_leading_vectors(spectra.gram(matrix, dtype=torch.float32), k, overwrite=True)
    resolved = squares[k - 1] > RESOLVED * squares[0]
    return (squares.double().clamp(min=0).sqrt(), basis) if bool(resolved) else None


def _rayleigh_ritz(matrix: Tensor, basis: Tensor) -> Factors:
    """Return the singular triplets of a matrix within the span of right vectors B.

    With BᵀB = L Lᵀ, the vectors B L⁻ᵀ Q are those where L⁻¹ (A B)ᵀ(A B) L⁻ᵀ = Q Σ² Qᵀ.
    """
    from merganser.kernels.lapack import leading_eigenpairs

    image = product(basis.T, matrix.T).T
    lower = torch.linalg.cholesky(spectra.mirror(spectra.gram(basis)))
    half = torch.linalg.solve_triangular(lower, spectra.mirror(spectra.gram(image)), upper=False)
    squares, q = leading_eigenpairs(torch.linalg.solve_triangular(lower, half.T, upper=False), basis.shape[1])
    s, rotation = squares.clamp(min=0).sqrt(), torch.linalg.solve_triangular(lower.T, q, upper=True)
    u, v = (product(part.float().T, side.T).T for part, side in ((rotation / s, image), (rotation, basis)))
    return Factors(u, s.float(), v)


def _error(matrix: Tensor, factors: Factors, following: Tensor) -> float:
    """Estimate ‖R D‖ / ‖Σ‖ with Gaussian probes; `following` is the first singular value beyond those taken."""
    u, s, v = factors
    gap = s.double().square() - following.square()
    if not bool((gap > 0).all()):
        return float("inf")
    probes = torch.randn(s.numel(), _PROBES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probes *= (s.square() / gap)[:, None]
    # Rows of probes instead of columns: BLAS multiplies a few columns many times slower.
    residual = product(product(probes.float().T, u.T), matrix)
    product((s[:, None] * probes).float().T, v.T, residual, scale=-1.0)
    return float(residual.double().norm() / _PROBES**0.5 / s.norm())


def _uncertainty(values: Tensor) -> float:
    """Return the expected relative error of the sum of the singular values, from that of their squares."""
    square = ROUNDING * values[0] ** 2
    each = torch.minimum(square / (2 * values).clamp(min=1e-300), square.sqrt())
    return float(each.norm() / values.sum())
