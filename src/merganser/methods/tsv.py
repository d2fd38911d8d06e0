"""TSV-Merge: task singular vectors, truncated and made orthogonal across tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from merganser.checkpoints.base import TensorSpec
from merganser.kernels.leading import leading_svd
from merganser.kernels.polar import FLOAT32_LIMIT, TOLERANCE, inverse_root
from merganser.kernels.spectra import HELD, SMALL, Factors, beside, top_svd, top_svds
from merganser.lazy import torch
from merganser.methods.duplicates import average_over_groupings
from merganser.methods.matrices import FLOOR, MatrixRule, WeightedDeltas, matrix_shape, rank_kept, side_by_side
from merganser.methods.parameters import param
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

Orthogonalize = Literal["polar", "whiten", "none"]


@register
@dataclass(frozen=True)
class TSV(MatrixRule):
    """M = U⊥ Σ V⊥ᵀ with U = [U₁ … U_T] and V = [V₁ … V_T] the top-k singular vectors of the task matrices.

    Gargiulo et al. 2025, Task Singular Vectors (arXiv:2412.00081).

    U⊥ and V⊥ are the orthogonal Procrustes solutions for U and V, as filtered partial isometries
    (`merganser.kernels.polar.polar`). If experts overlap, the plain polar factor adds arbitrary directions and turns
    two identical experts into the expert plus noise of its own norm. Here identical experts return the truncated
    expert. So do, to the order of their distance, experts less than 1e-3 apart; from 1e-2 on the rule is the published
    one, and in between it changes smoothly (`merganser.methods.duplicates`). Directions that may be noise of float32
    weights (`tolerance`) are left out (`merganser.kernels.polar.noise_levels`).

    Matrices with sides of 512 and more are decomposed in float32 with a measured error (`merganser.kernels.leading`),
    which changes the result by about 1e-5; `exact` decomposes them in float64. Switches for ablations: `low_rank:
    false` keeps every component, `orthogonalize: none` adds the truncated task matrices.
    """

    name = "tsv"
    summary = "low-rank task matrices whose singular vectors are made orthogonal across tasks"

    exclude: tuple[str, ...] = param(("*text_projection*",), "patterns of tensor names that are averaged instead")
    rank_fraction: float | None = param(None, "share of the components kept per model; 1/T if absent", low=0, high=1)
    low_rank: bool = param(True, "truncate the task matrices")
    orthogonalize: Literal["polar", "whiten", "none"] = param(
        "polar",
        "filtered polar factor, ridge-whitened factor, or none",
        choices=("polar", "whiten", "none"),
    )
    tolerance: float = param(TOLERANCE, "relative size below which shared directions count once", low=0, high=1)
    exact: bool = param(False, "decompose large matrices in float64")

    def combine(self, deltas: WeightedDeltas) -> Tensor:
        n = min(deltas.shape)
        k = rank_kept(n, len(deltas), self.rank_fraction) if self.low_rank else n
        return orthogonal_sum(decompose(deltas, k, self.exact), self.orthogonalize, self.tolerance, deltas.dtype)

    def scratch(self, spec: TensorSpec, models: int) -> int:
        d, m = matrix_shape(spec.shape)
        n = min(d, m)
        columns = models * (rank_kept(n, models, self.rank_fraction) if self.low_rank else n)
        held = 2 * spec.nbytes + 8 * min(spec.numel, HELD)
        return held + 8 * 3 * (d + m) * columns + 8 * 4 * min(max(d, m), max(n, columns)) ** 2


def decompose(matrices: Sequence[Tensor], k: int, exact: bool = False) -> list[Factors]:
    """Return the top-k factors of every task matrix, without components due to rounding."""
    if min(matrices[0].shape) <= SMALL:
        return [factors.above(FLOOR) for factors in top_svds(list(matrices), k)]
    decomposition = top_svd if exact else leading_svd
    return side_by_side(lambda index: decomposition(matrices[index], k).above(FLOOR), range(len(matrices)))


def orthogonal_sum(
    factors: Sequence[Factors],
    orthogonalize: Orthogonalize = "polar",
    tolerance: float = TOLERANCE,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return U⊥ Σ V⊥ᵀ from the factors of each task, in `dtype` (float32)."""

    def merge(parts: Sequence[Factors]) -> Tensor:
        if orthogonalize == "polar" and len(parts) > 1 and all(part.s.dtype == torch.float32 for part in parts):
            return _product_of_narrow(_concatenate(parts), tolerance).to(dtype or torch.float32)
        u, s, v = orthogonal(parts, orthogonalize, tolerance, dtype or torch.float32)
        # Orthonormal factors are well-conditioned: their product keeps all digits of `dtype`.
        return (u * s) @ v.T

    return merge(factors) if orthogonalize == "none" else average_over_groupings(factors, merge)


def orthogonal(
    factors: Sequence[Factors],
    orthogonalize: Orthogonalize = "polar",
    tolerance: float = TOLERANCE,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (U⊥, Σ, V⊥) in `dtype` (float64) with the tasks' columns concatenated; one task is returned as it is."""
    dtype = dtype or torch.float64
    u, s, v = _concatenate(factors)
    if orthogonalize != "none" and len(factors) > 1:
        # Decompositions in parallel, then products that use all threads.
        kind = orthogonalize
        roots = side_by_side(lambda side: _root(side, tolerance, kind), (u, v))
        u, v = (_times_root(side, *root, dtype) for side, root in zip((u, v), roots, strict=True))
    return u.to(dtype), s.to(dtype), v.to(dtype)


def _concatenate(factors: Sequence[Factors]) -> Factors:
    return Factors(beside(*(f.u for f in factors)), torch.cat([f.s for f in factors]), beside(*(f.v for f in factors)))


def _product_of_narrow(factors: Factors, tolerance: float) -> Tensor:
    """Return U⊥ Σ V⊥ᵀ of concatenated float32 factors without orthogonalising the longer one: with the root R of its
    Gram matrix, U⊥ Σ V⊥ᵀ = U (R Σ V⊥ᵀ).
    """
    u, s, v = factors
    if u.shape[0] < v.shape[0]:
        return _product_of_narrow(factors.T, tolerance).T
    (left, loud), right = side_by_side(lambda side: _root(side, tolerance, "polar"), (u, v))
    inner = s[:, None] * _times_root(v, *right, torch.float32).to(torch.float32).T
    if u.shape[0] >= u.shape[1] and loud <= FLOAT32_LIMIT:
        return u @ (left.to(torch.float32) @ inner)
    return _times_root(u, left, loud, torch.float32).to(torch.float32) @ inner


def _root(side: Tensor, tolerance: float, kind: Literal["polar", "whiten"]) -> tuple[Tensor, float]:
    """Return the root that orthonormalises the short side of a matrix, and how much it amplifies rounding."""
    root = inverse_root(side if side.shape[0] >= side.shape[1] else side.T, tolerance, kind)
    return root.matrix(), root.amplification


def _times_root(side: Tensor, root: Tensor, amplification: float, dtype: torch.dtype) -> Tensor:
    """Return the polar factor, in `dtype` if that costs no digits."""
    dtype = dtype if amplification <= FLOAT32_LIMIT else torch.float64
    side, root = side.to(dtype), root.to(dtype)
    return (root @ side.T).T if side.shape[0] >= side.shape[1] else root @ side
