"""Rules that change the singular values of task matrices: SVC, subspace boosting, STAR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.kernels.leading import leading_svd
from merganser.kernels.spectra import spectrum, top_svd
from merganser.lazy import torch
from merganser.methods.matrices import MatrixRule, WeightedDeltas, sum_of
from merganser.methods.parameters import param
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class SVC(MatrixRule):
    """Singular value calibration: σ_r ← γ_r σ_r for ΣΔ_t = Σ_r σ_r u_r v_rᵀ.

    Task t has the response a_t = u_rᵀ Δ_t in direction r, the sum has a = σ_r v_rᵀ. The coefficient s_t = ⟨a, a_t⟩ /
    ‖a_t‖² is 1 if the sum equals the task's response, and T if all tasks agree, i.e. if shared knowledge was counted T
    times. γ_r = T / Σ_t max(`floor`, s_t). With a floor of 1 spectra only shrink; a smaller floor also raises
    directions in which tasks were attenuated. Li et al. 2026, When Shared Knowledge Hurts
    (arXiv:2602.05536).
    """

    name = "svc"
    summary = "the sum of task matrices with over-counted singular values scaled back"

    floor: float = param(1.0, "smallest projection coefficient used", low=1e-3)

    def combine(self, deltas: WeightedDeltas) -> Tensor:
        total = top_svd(sum_of(iter(deltas)), min(deltas.shape))
        coefficients = torch.zeros_like(total.s)
        for delta in deltas:
            answer = total.u.T @ delta.double()
            along = (answer * total.v.T).sum(dim=1) * total.s
            size = answer.square().sum(dim=1)
            # A task without a response in a direction neither over- nor under-counts it.
            ratio = torch.where(size > 0, along / size.clamp(min=torch.finfo(size.dtype).tiny), 1.0)
            coefficients += ratio.clamp(min=self.floor)
        calibrated = total._replace(s=total.s * len(deltas) / coefficients)
        return calibrated.matrix().to(deltas.dtype)


@register
@dataclass(frozen=True)
class SubspaceBoosting(MatrixRule):
    """σ_r ← max(σ_r, σ_c) for ΣΔ_t, with c the first index at which Σ_{r≤c} σ_r ≥ `energy` · Σ σ_r.

    Summed task vectors collapse onto few directions; raising the tail restores the rank. Directions that the sum lacks
    entirely stay absent. Skorobogat et al. 2025, Subspace-Boosted Model Merging (arXiv:2506.16506).
    """

    name = "subspace_boosting"
    summary = "the sum of task matrices with its small singular values raised"

    energy: float = param(0.5, "share of the nuclear norm at which the spectrum is cut off", low=0, high=1)

    def combine(self, deltas: WeightedDeltas) -> Tensor:
        total = top_svd(sum_of(iter(deltas)), min(deltas.shape))
        if total.rank:
            cut = reaching(total.s, self.energy)
            total = total._replace(s=total.s.clamp(min=float(total.s[cut - 1])))
        return total.matrix().to(deltas.dtype)


@register
@dataclass(frozen=True)
class STAR(MatrixRule):
    """Spectral truncate and rescale: the mean over tasks of the top components of each Δ_t.

    Rank r_t is the least with Σ_{r≤r_t} σ_r ≥ `nuclear_share` · ‖Δ_t‖_*; the kept values are scaled by
    ‖Δ_t‖_* / Σ_{r≤r_t} σ_r so that every task keeps its nuclear norm. Large matrices are decomposed in float32 with a
    measured error (`merganser.kernels.leading`). Lee et al. 2025, STAR (arXiv:2502.10339).
    """

    name = "star"
    summary = "mean of truncated task matrices rescaled to their nuclear norm"

    nuclear_share: float = param(0.4, "share of the nuclear norm kept before rescaling", low=0, high=1)

    def combine(self, deltas: WeightedDeltas) -> Tensor:
        merged = deltas.zeros(torch.float64)
        for delta in deltas:
            values = spectrum(delta)
            if values.any():
                kept = leading_svd(delta, reaching(values, self.nuclear_share))
                merged += kept.matrix() * (values.sum() / kept.s.double().sum())
        return (merged / len(deltas)).to(deltas.dtype)


def reaching(s: Tensor, share: float) -> int:
    """Return the smallest number of leading values whose sum is `share` of the total up to rounding; at least 1."""
    cumulative = torch.cumsum(s, dim=0)
    target = share * cumulative[-1] * (1 - 1e-7)
    return min(s.numel(), 1 + int((cumulative < target).sum()))
