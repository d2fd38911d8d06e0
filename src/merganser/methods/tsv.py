"""TSV-Merge: task singular vectors, truncated and made orthogonal across tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from merganser.checkpoints.base import TensorSpec
from merganser.kernels.leading import leading_svd
from merganser.kernels.polar import SENSITIVITY, TOLERANCE, IllConditioned, InverseRoot, inverse_root
from merganser.kernels.spectra import HELD, SMALL, Factors, beside, product, top_svd, top_svds
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
    fresh = True

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
        return merge_tasks(deltas, k, self.orthogonalize, self.tolerance, self.exact)

    def scratch(self, spec: TensorSpec, models: int) -> int:
        d, m = matrix_shape(spec.shape)
        n = min(d, m)
        columns = models * (rank_kept(n, models, self.rank_fraction) if self.low_rank else n)
        held = 2 * spec.nbytes + 8 * min(spec.numel, HELD)
        return held + 8 * 3 * (d + m) * columns + 8 * 4 * min(max(d, m), max(n, columns)) ** 2


def merge_tasks(
    deltas: WeightedDeltas, k: int, orthogonalize: Orthogonalize, tolerance: float, exact: bool = False
) -> Tensor:
    """Return U⊥ Σ V⊥ᵀ of the task matrices; decomposed in float64 if `exact`, or if experts are so much alike that
    orthogonalising amplifies the errors of float32.
    """
    try:
        factors = decompose(deltas, k, exact)
        return orthogonal_sum(factors, orthogonalize, tolerance, deltas.dtype, SENSITIVITY)
    except IllConditioned:
        return orthogonal_sum(decompose(deltas, k, exact=True), orthogonalize, tolerance, deltas.dtype)


def decompose(matrices: Sequence[Tensor], k: int, exact: bool = False) -> list[Factors]:
    """Return the top-k factors of every task matrix, without components due to rounding."""
    shape = matrices.shape if isinstance(matrices, WeightedDeltas) else matrices[0].shape
    if min(shape) <= SMALL:
        return [factors.above(FLOOR) for factors in top_svds(list(matrices), k)]
    if exact:
        return side_by_side(lambda index: top_svd(matrices[index], k).above(FLOOR), range(len(matrices)))
    # One place for the float32 factors of all tasks, so that they need not be copied to be orthogonalised together.
    tasks = len(matrices)
    places = [torch.empty(tasks, min(k, *shape), side, dtype=torch.float32, device="cpu") for side in shape]
    spare: list[Tensor | None] = [None] * tasks

    def put_in_place(index: int) -> Factors:
        matrix = matrices.compute(index, spare.pop()) if isinstance(matrices, WeightedDeltas) else matrices[index]
        u, s, v = factors = leading_svd(matrix, k).above(FLOOR)
        spare.append(matrix)
        if s.dtype != torch.float32:
            return factors
        u, v = (place[index, : s.numel()].copy_(side.T).T for place, side in zip(places, (u, v), strict=True))
        return Factors(u, s, v)

    return side_by_side(put_in_place, range(tasks))


def orthogonal_sum(
    factors: Sequence[Factors],
    orthogonalize: Orthogonalize = "polar",
    tolerance: float = TOLERANCE,
    dtype: torch.dtype | None = None,
    limit: float = math.inf,
) -> Tensor:
    """Return U⊥ Σ V⊥ᵀ from the factors of each task, in `dtype` (float32).

    Raises:
        IllConditioned: If the factors are in float32 and their errors would be amplified by more than `limit`.
    """

    def merge(parts: Sequence[Factors]) -> Tensor:
        if orthogonalize == "polar" and len(parts) > 1 and any(part.s.dtype == torch.float32 for part in parts):
            narrow = Factors(*(part.float() for part in _concatenate(parts)))
            return _product_of_narrow(narrow, tolerance, limit).to(dtype or torch.float32)
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
        roots = side_by_side(lambda side: inverse_root(_tall(side), tolerance, kind), (u, v))
        u, v = (_polar_factor(side, root, root.precision(dtype)) for side, root in zip((u, v), roots, strict=True))
    return u.to(dtype), s.to(dtype), v.to(dtype)


def _concatenate(factors: Sequence[Factors]) -> Factors:
    return Factors(beside(*(f.u for f in factors)), torch.cat([f.s for f in factors]), beside(*(f.v for f in factors)))


def _product_of_narrow(factors: Factors, tolerance: float, limit: float) -> Tensor:
    """Return U⊥ Σ V⊥ᵀ of concatenated float32 factors without orthogonalising the longer one: with the root R of its
    Gram matrix, U⊥ Σ V⊥ᵀ = U (R Σ V⊥ᵀ).
    """
    u, s, v = factors
    if u.shape[0] < v.shape[0]:
        return _product_of_narrow(factors.T, tolerance, limit).T
    left_root = partial(_narrow_root, u, tolerance, limit)

    def scaled_right() -> Tensor:
        right = _narrow_root(v, tolerance, limit)
        return _polar_factor(v, right, right.precision(torch.float32)).to(torch.float32).T.mul_(s[:, None])

    # One after the other if threads are few: the first decomposition is gone before the second needs its memory.
    steps: tuple[Callable[[], Any], ...] = (scaled_right, left_root)
    inner: Tensor
    left: InverseRoot
    inner, left = side_by_side(lambda step: step(), steps)
    precision = left.precision(torch.float32)
    if u.shape[0] >= u.shape[1] and precision == torch.float32:
        return left.polar_factor_times(u, inner)
    return product(_polar_factor(u, left, precision).to(torch.float32), inner)


def _narrow_root(side: Tensor, tolerance: float, limit: float) -> InverseRoot:
    tall = _tall(side)
    root = inverse_root(tall, tolerance)
    root.check(tall.shape[0], limit)
    return root


def _polar_factor(side: Tensor, root: InverseRoot, dtype: torch.dtype) -> Tensor:
    found = root.polar_factor(_tall(side), dtype)
    return found if side.shape[0] >= side.shape[1] else found.T


def _tall(side: Tensor) -> Tensor:
    return side if side.shape[0] >= side.shape[1] else side.T
