"""Isotropic merging: a flat spectrum for the merged task matrix (Iso-C, Iso-CTS)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.kernels.leading import LARGE, leading_svd
from merganser.kernels.polar import (
    FLOAT32_LIMIT,
    SENSITIVITY,
    TOLERANCE,
    IllConditioned,
    inverse_root,
    polar,
    polar_and_norm,
)
from merganser.kernels.spectra import Factors, product, top_svd
from merganser.lazy import torch
from merganser.methods.duplicates import Sketches, average_over_groupings
from merganser.methods.matrices import FLOOR, MatrixRule, WeightedDeltas, sum_of
from merganser.methods.parameters import param
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Isotropic(MatrixRule):
    """The common part of the two rules. For CLIP models, a `scale` between 1.0 and 1.5 works well."""

    fresh = True
    tolerance: float = param(TOLERANCE, "relative size below which a direction counts as absent", low=0, high=1)
    exact: bool = param(False, "compute with large matrices in float64")


@register
@dataclass(frozen=True)
class IsoC(Isotropic):
    """M = σ̄ · U Vᵀ with ΣΔ_t = U Σ Vᵀ and σ̄ the mean singular value: polar factor times nuclear norm over n.

    Marczak et al. 2025, No Task Left Behind (arXiv:2502.04959).
    """

    name = "iso_c"
    summary = "the sum of the task matrices with a flat spectrum"

    def combine(self, deltas: WeightedDeltas) -> Tensor:
        return flatten_spectrum(sum_of(iter(deltas)), self.tolerance, self.exact).to(deltas.dtype)


@register
@dataclass(frozen=True)
class IsoCTS(Isotropic):
    """Iso-C with the least common directions replaced by directions of the single tasks.

    The top c singular directions (U_c, V_c) of ΣΔ_t are kept; each task adds the top (n−c)/T of
    Δ_t − U_c U_cᵀ Δ_t. The concatenated U and V are orthogonalised, M = σ̄ U⊥ V⊥ᵀ with σ̄ the mean of all
    singular values gathered. c is the nearest to `common_fraction`·n that leaves T equal shares. Experts less than 1e-3
    apart count as one, which the published rule turns into noise (`merganser.methods.duplicates`). Marczak et al. 2025
    (arXiv:2502.04959).
    """

    name = "iso_cts"
    summary = "a flat spectrum over common and task-specific directions"

    common_fraction: float = param(0.8, "share of the directions taken from the sum", low=0, high=1)

    def combine(self, deltas: WeightedDeltas) -> Tensor:
        n = min(deltas.shape)
        share = shares(n, len(deltas), self.common_fraction)
        total = sum_of(iter(deltas))
        if share == 0:
            return flatten_spectrum(total, self.tolerance, self.exact).to(deltas.dtype)
        common = top_svd(total, n - share * len(deltas)).above(FLOOR)
        if not self.exact and n >= LARGE and deltas.dtype == torch.float32:
            with suppress(IllConditioned):
                return self._join(common, deltas, share, leading_svd, torch.float32)
        return self._join(common, deltas, share, top_svd, torch.float64)

    def _join(
        self,
        common: Factors,
        deltas: WeightedDeltas,
        share: int,
        decompose: Callable[[Tensor, int], Factors],
        wide: torch.dtype,
    ) -> Tensor:
        """Join the common directions and `share` directions of each task, and give all the same weight.

        Raises:
            IllConditioned: If `wide` is float32 and too narrow for experts that are so much alike.
        """
        n, left, parts, sketches = min(deltas.shape), common.u.to(wide), [], Sketches()
        for delta in deltas:
            rest = delta.to(wide, copy=True)
            sketches.add(rest)
            floor = FLOOR * float(rest.norm())
            product(left, product(left.T, rest), rest, scale=-1.0)
            own = decompose(rest, share)
            parts.append(own.truncate(int((own.s > floor).sum())))
        limit = SENSITIVITY if wide == torch.float32 else math.inf

        def merge(own: Sequence[Factors]) -> Tensor:
            u, s, v = (torch.cat(part, dim=-1) for part in zip(common, *own, strict=True))
            if s.numel() == 0:
                return deltas.zeros()
            u, v = polar(u, self.tolerance, limit=limit), polar(v, self.tolerance, limit=limit)
            return (u * (s.sum() / n)).to(deltas.dtype) @ v.to(deltas.dtype).T

        return average_over_groupings(parts, merge, sketches.distance)


def shares(n: int, models: int, common_fraction: float) -> int:
    """Return how many directions each task may add, so that T shares and the common ones make n."""
    share = round((n - int(common_fraction * n)) / models)
    return min(share, n // models)


def flatten_spectrum(matrix: Tensor, tolerance: float, exact: bool = False) -> Tensor:
    """Return mean(σ) · polar factor of a float64 matrix; the last product is in float32 if that costs no digits."""
    n = min(matrix.shape)
    if exact or n < LARGE:
        factor, norm = polar_and_norm(matrix, tolerance)
        return factor * (norm / n)
    if matrix.shape[0] < matrix.shape[1]:
        return flatten_spectrum(matrix.T, tolerance).T
    root = inverse_root(matrix, tolerance)
    wide = torch.float32 if root.mean_amplification <= FLOAT32_LIMIT else torch.float64
    # The transpose of a product, which MKL computes faster.
    return product((root.matrix() * (root.s.sum() / n)).to(wide), matrix.to(wide).T).T.to(matrix.dtype)
