"""Polar factors as filtered partial isometries, and the noise below which a direction means nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from merganser.kernels.spectra import gram, leading_eigenpairs, times
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Orthogonalization = Literal["polar", "whiten"]

#: Default tolerance of polar factors: the noise of singular vectors of differences of float32 weights.
TOLERANCE = 1e-5
#: Singular values that a float64 Gram matrix tells from zero, relative to the largest.
FINEST = 3e-7
#: Up to this amplification an inverse root may be applied in float32; beyond it cancellation costs too many digits.
FLOAT32_LIMIT = 64.0
#: Above this share of the largest, the smallest eigenvalue of a Gram matrix is accurate in float32.
WELL_CONDITIONED = 1e-2


def polar(matrix: Tensor, tolerance: float = TOLERANCE, kind: Orthogonalization = "polar") -> Tensor:
    """The polar factor of A = U Σ Vᵀ as a filtered partial isometry, U f(Σ) Vᵀ, in float64.

    The orthogonal Procrustes solution U Vᵀ is not continuous where A loses rank: directions with σ → 0 enter
    with weight one although they are arbitrary. With x = σ/σ₁, τ = `tolerance`, and λ ≤ τ the level of noise in the
    direction (`noise_levels`):

    - `polar`: f = 1 for x ≥ λ, f = 0 for x ≤ λ/10, and a smooth step in log x between them (a hard cut would
      jump). Above λ it is the Procrustes solution, below λ/10 the partial isometry.
    - `whiten`: f = x / √(x² + τ²), the ridge-whitened matrix A (AᵀA + τ²σ₁²)^(−½): smooth everywhere, exact
      nowhere.

    Since λ/10 ≥ 3e-8 is within what a float64 Gram matrix resolves, no SVD is needed.
    """
    return polar_and_norm(matrix, tolerance, kind)[0]


def polar_and_norm(
    matrix: Tensor, tolerance: float = TOLERANCE, kind: Orthogonalization = "polar"
) -> tuple[Tensor, float]:
    """The polar factor and the nuclear norm from one decomposition."""
    if matrix.shape[0] < matrix.shape[1]:
        factor, norm = polar_and_norm(matrix.T, tolerance, kind)
        return factor.T, norm
    root = inverse_root(matrix, tolerance, kind)
    return times(matrix, root.matrix()), float(root.s.sum())


class InverseRoot(NamedTuple):
    """The filtered (AᵀA)^(−½) = W diag(f(σ)/σ) Wᵀ of a tall A = U diag(σ) Wᵀ: A times it is the polar factor of A."""

    s: Tensor
    vectors: Tensor
    weights: Tensor

    @property
    def amplification(self) -> float:
        """How much of a relative error of A may appear in the polar factor."""
        return float(self.s[0] * self.weights.max()) if self.s.numel() else 0.0

    @property
    def mean_amplification(self) -> float:
        """How much of a relative error spread evenly over A appears in the polar factor: rms(σ) · rms(f/σ)."""
        n = max(1, self.s.numel())
        return float(self.s.norm() * self.weights.norm()) / n

    def matrix(self) -> Tensor:
        active = self.weights > 0
        lower = gram((self.vectors[:, active] * self.weights[active].sqrt()).T, dtype=self.vectors.dtype)
        return lower.tril() + lower.tril(-1).T


def inverse_root(matrix: Tensor, tolerance: float = TOLERANCE, kind: Orthogonalization = "polar") -> InverseRoot:
    """What makes the columns of a matrix orthonormal, filtered as `polar` says.

    In float32 for a float32 matrix of at least twice as many rows as columns, if it proves well-conditioned.
    """
    d, n = matrix.shape
    narrow = matrix.dtype == torch.float32 and 2 * n <= d and kind == "polar"
    values, w = leading_eigenpairs(gram(matrix, dtype=torch.float32 if narrow else None), n)
    if narrow and not values[-1] > WELL_CONDITIONED * values[0]:
        return inverse_root(matrix.double(), tolerance, kind)
    s = values.clamp(min=0).sqrt()
    if s.numel() == 0 or not s[0] > 0:
        return InverseRoot(s, w, torch.zeros_like(s))
    x = s / s[0]
    kept = passband(x, tolerance if kind == "whiten" else noise_levels(x, d, tolerance), kind)
    return InverseRoot(s, w, torch.where(kept > 0, kept / s.clamp(min=torch.finfo(s.dtype).tiny), 0.0))


def noise_levels(x: Tensor, rows: int, tolerance: float = TOLERANCE) -> Tensor:
    """Return what noise makes of the singular values of a matrix whose columns are known to `tolerance`.

    An error of relative size τ in each of n columns of length d is spread over d directions. In the span of the r
    weakest right singular vectors and the d − n + r left directions that the strong ones leave, it is of the size

        λ = τ √((d − n + r)/d).

    A single weak direction of a square matrix, which chance produces often, therefore has to fall below τ/√n to be
    indistinguishable from noise, and the many that near-identical columns produce below about τ. r counts the
    directions as weak as this one, r(x) = Σ_j 2/(1 + (x_j/x)²), so that λ changes smoothly with the spectrum. It is
    never below what a float64 Gram matrix resolves.

    Args:
        x: Singular values relative to the largest.
        rows: The number of rows d, at least that of values.
        tolerance: The noise τ.

    Returns:
        The level λ for every singular value.

    Example:
        >>> noise_levels(torch.tensor([1.0, 1e-4], dtype=torch.float64), 100, 1e-2)
        tensor([0.0100, 0.0099], dtype=torch.float64)
    """
    if tolerance == 0:
        return torch.zeros_like(x)
    # Strong directions are kept at any level.
    weak = x < tolerance
    few = x[weak].double()
    alike = (2 / (1 + (few / few[:, None].clamp(min=1e-300)).square())).sum(dim=1)
    levels = torch.full_like(x, tolerance)
    share = ((rows - x.numel() + alike) / rows).clamp(0, 1)
    levels[weak] = (tolerance * share.sqrt()).clamp(min=min(FINEST, tolerance)).to(x.dtype)
    return levels


def passband(x: Tensor, level: Tensor | float = TOLERANCE, kind: Orthogonalization = "polar") -> Tensor:
    """The filter f of `polar`, of singular values relative to the largest; at `level` a direction counts fully."""
    if kind == "whiten":
        return x / torch.sqrt(x.square() + level**2)
    level = torch.as_tensor(level, dtype=x.dtype, device=x.device)
    t = (torch.log10(x.clamp(min=1e-300) / level.clamp(min=1e-300)) + 1).clamp(0, 1)
    return torch.where(level > 0, t * t * (3 - 2 * t), (x > 0).to(x.dtype))
