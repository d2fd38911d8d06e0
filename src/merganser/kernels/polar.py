"""Polar factors as filtered partial isometries, and the noise below which a direction means nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from merganser.kernels.leading import LARGE
from merganser.kernels.spectra import gram, leading_eigenpairs, mirror, product, times, transpose_times
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
#: Above this share of the largest, eigenvalues of a Gram matrix are accurate in float32.
WELL_CONDITIONED = 2e-3
#: Largest allowed defect of a polar factor computed in float32; its error is about half of that.
DEFECT = 8e-5
#: Up to this share of the directions may be weaker and be computed again in float64.
FEW = 1 / 8
#: Largest amplification of the errors of float32 factors by orthogonalising them; independent tasks have about 2.
SENSITIVITY = 4.0
_PROBES = 8
_SIDE = 256


class IllConditioned(Exception):
    """Orthogonalising would amplify the errors of float32 factors too much."""


def polar(
    matrix: Tensor, tolerance: float = TOLERANCE, kind: Orthogonalization = "polar", limit: float = math.inf
) -> Tensor:
    """The polar factor of A = U Σ Vᵀ as a filtered partial isometry, U f(Σ) Vᵀ, in float64.

    The orthogonal Procrustes solution U Vᵀ is not continuous where A loses rank: directions with σ → 0 enter
    with weight one although they are arbitrary. With x = σ/σ₁, τ = `tolerance`, and λ ≤ τ the level of noise in the
    direction (`noise_levels`):

    - `polar`: f = 1 for x ≥ λ, f = 0 for x ≤ λ/10, and a smooth step in log x between them (a hard cut would
      jump). Above λ it is the Procrustes solution, below λ/10 the partial isometry.
    - `whiten`: f = x / √(x² + τ²), the ridge-whitened matrix A (AᵀA + τ²σ₁²)^(−½): smooth everywhere, exact
      nowhere.

    Since λ/10 ≥ 3e-8 is within what a float64 Gram matrix resolves, no SVD is needed.

    Raises:
        IllConditioned: If errors of A would be amplified by more than `limit` (`InverseRoot.sensitivity`).
    """
    return polar_and_norm(matrix, tolerance, kind, limit)[0]


def polar_and_norm(
    matrix: Tensor, tolerance: float = TOLERANCE, kind: Orthogonalization = "polar", limit: float = math.inf
) -> tuple[Tensor, float]:
    """The polar factor and the nuclear norm from one decomposition."""
    if matrix.shape[0] < matrix.shape[1]:
        factor, norm = polar_and_norm(matrix.T, tolerance, kind, limit)
        return factor.T, norm
    root = inverse_root(matrix, tolerance, kind)
    root.check(matrix.shape[0], limit)
    factor = times(matrix, root.matrix().double())
    return (factor if root.weak is None else factor.addmm_(*root.weakest(factor.dtype))), float(root.s.sum())


class InverseRoot(NamedTuple):
    """The filtered (AᵀA)^(−½) = W diag(f(σ)/σ) Wᵀ of a tall A = U diag(σ) Wᵀ: A times it is the polar factor of A.

    If float32 has too few digits for A times the weakest directions, `weak` holds their f(σ) u.
    """

    s: Tensor
    vectors: Tensor
    weights: Tensor
    weak: Tensor | None = None

    @property
    def amplification(self) -> float:
        """How much of a relative error of A may appear in the polar factor."""
        return float(self.s[0] * self.weights.max()) if self.s.numel() else 0.0

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        """Return `dtype` if the product of A and the root has all its digits there, otherwise float64."""
        measured = self.vectors.dtype == torch.float32
        return dtype if measured or self.amplification <= FLOAT32_LIMIT else torch.float64

    @property
    def mean_amplification(self) -> float:
        """How much of a relative error spread evenly over A appears in the polar factor: rms(σ) · rms(f/σ)."""
        n = max(1, self.s.numel())
        return float(self.s.norm() * self.weights.norm()) / n

    def sensitivity(self, rows: int) -> float:
        """Return how much of a relative error spread evenly over the d = `rows` rows of A appears in its polar factor.

        To first order, an error E changes it by U((UᵀEW)_ij − (UᵀEW)_ji)/(ς_i + ς_j)Wᵀ within the span of U and by
        E W diag(1/ς) Wᵀ outside of it, with ς = σ/f. For an E of independent entries the ratio is

            √( mean(σ²) · (Σ_{i≠j} 2/(ς_i + ς_j)² + (d − n) Σ_j 1/ς_j²) / (n d) ).

        A single weak direction of a square matrix, which chance produces often, is therefore as stable as the others.
        """
        s = 1 / self.weights[self.weights > 0].double()
        n = s.numel()
        if n == 0:
            return 0.0
        starts = range(0, n, _SIDE)
        pairs = math.fsum(float((2 / (s[start : start + _SIDE, None] + s).square()).sum()) for start in starts)
        single = float(s.reciprocal().square().sum())
        mean = float(self.s.double().square().mean())
        return math.sqrt(mean * (pairs - single / 2 + (rows - n) * single) / (n * rows))

    def check(self, rows: int, limit: float) -> None:
        """Raise `IllConditioned` if errors would be amplified by more than `limit`."""
        if limit < math.inf and self.sensitivity(rows) > limit:
            raise IllConditioned

    def matrix(self) -> Tensor:
        """Return the root, without the directions in `weak`."""
        strong = slice(self.s.numel() - (0 if self.weak is None else self.weak.shape[1]))
        weights, rows = self.weights[strong], self.vectors.T[strong]
        active = weights > 0
        rows = rows if bool(active.all()) else rows[active]
        return mirror(gram(rows * weights[active].sqrt()[:, None], dtype=self.vectors.dtype))

    def weakest(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return two factors of what the directions in `weak` add to the polar factor."""
        assert self.weak is not None
        return self.weak.to(dtype), self.vectors[:, -self.weak.shape[1] :].T.to(dtype)

    def polar_factor(self, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the polar factor of A in `dtype`."""
        found = product(self.matrix().to(dtype), matrix.to(dtype).T)
        if self.weak is not None:
            left, rows = self.weakest(dtype)
            product(rows.T, left.T, found)
        return found.T

    def polar_factor_times(self, matrix: Tensor, right: Tensor) -> Tensor:
        """Return the product of the polar factor of A with a matrix, without forming the former."""
        found = product(matrix, product(self.matrix().to(matrix.dtype), right))
        if self.weak is None:
            return found
        left, rows = self.weakest(found.dtype)
        return product(left, product(rows, right), found)


def inverse_root(matrix: Tensor, tolerance: float = TOLERANCE, kind: Orthogonalization = "polar") -> InverseRoot:
    """Return what makes the columns of a matrix orthonormal, filtered as `polar` says.

    A large or tall float32 matrix is decomposed in float32, with its weak directions computed again in float64, if the
    defect XᵀX − W f(Σ)² Wᵀ of its polar factor X, which bounds the error of X, stays below `DEFECT`.
    """
    d, n = matrix.shape
    if matrix.dtype == torch.float32 and kind == "polar" and n > 0 and (2 * n <= d or n >= LARGE):
        squares, w = leading_eigenpairs(gram(matrix, dtype=torch.float32), n)
        weak = n - int((squares > WELL_CONDITIONED * squares[0]).sum())
        if weak <= FEW * n:
            s, w, image = _refine(matrix, squares, w, weak) if weak else (squares.sqrt(), w, None)
            root = _weigh(s, w, d, tolerance, kind)
            if image is not None:
                root = root._replace(weak=(image * root.weights[-weak:]).float())
            if _defect(matrix, root) <= DEFECT:
                return root
        del squares, w
    values, w = leading_eigenpairs(gram(matrix), n)
    return _weigh(values.clamp(min=0).sqrt(), w, d, tolerance, kind)


def _weigh(s: Tensor, w: Tensor, rows: int, tolerance: float, kind: Orthogonalization) -> InverseRoot:
    if s.numel() == 0 or not s[0] > 0:
        return InverseRoot(s, w, torch.zeros_like(s))
    x = s / s[0]
    kept = passband(x, tolerance if kind == "whiten" else noise_levels(x, rows, tolerance), kind)
    return InverseRoot(s, w, torch.where(kept > 0, kept / s.clamp(min=torch.finfo(s.dtype).tiny), 0.0))


def _refine(matrix: Tensor, squares: Tensor, vectors: Tensor, weak: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular values and right singular vectors with the last `weak` computed again in float64, and the
    image of these; overwrites the vectors.

    What rounding left of the strong directions W₁ in the weak ones W₂ is removed to first order, W₂ ← W₂ − W₁ Λ₁⁻¹ W₁ᵀ
    AᵀA W₂; a Rayleigh–Ritz step then tells the weak ones apart.
    """
    strong, rest = vectors[:, :-weak], vectors[:, -weak:].double()
    mixed = strong.T @ transpose_times(matrix, times(matrix, rest)).float() / squares[:-weak, None]
    rest, _ = torch.linalg.qr(rest - (strong @ mixed).double())
    image = times(matrix, rest)
    values, rotation = leading_eigenpairs(gram(image), weak)
    s = torch.cat([squares[:-weak].sqrt(), values.clamp(min=0).sqrt().float()])
    vectors[:, -weak:] = (rotation.T @ rest.T).T
    return s, vectors, image @ rotation


def _defect(matrix: Tensor, root: InverseRoot) -> float:
    """Estimate ‖XᵀX − W f² Wᵀ‖_F / √n of X = A W diag(f/σ) Wᵀ with Gaussian probes."""
    n = matrix.shape[1]
    weak = matrix[:, :0] if root.weak is None else root.weak
    strong = n - weak.shape[1]
    vectors, weights = root.vectors[:, :strong], root.weights[:strong]
    probes = torch.randn(_PROBES, n, generator=torch.Generator().manual_seed(0)).to(matrix)
    along = product(probes, root.vectors)
    image = product(product(along[:, :strong] * weights, vectors.T), matrix.T)
    product(along[:, strong:], weak.T, image)
    back = torch.cat([product(product(image, matrix), vectors) * weights, product(image, weak)], dim=1)
    return float((back - along * (root.weights * root.s).square()).norm()) / math.sqrt(_PROBES * n)


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
