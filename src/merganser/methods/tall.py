"""TALL masks, which mark where a task vector dominates the sum of the others, and their consensus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.lazy import torch
from merganser.methods.base import Group, Reduction
from merganser.methods.norms import TaskVectorMethod
from merganser.methods.parameters import param, per_model
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class ConsensusTA(TaskVectorMethod):
    """θ = θ_0 + λ (ΣΔ_t) ⊙ [Σ_t m_t ≥ k] with the TALL masks m_t = [|Δ_t| > λ_t |ΣΔ − Δ_t|].

    This is task arithmetic without the entries that matter to no task, or (k = 2) to only one. Wang et al. 2024,
    Localizing Task Information (arXiv:2405.07813); λ_t from 0.2 to 0.6. With fewer than k models all must agree.
    """

    name = "consensus_ta"
    summary = "task arithmetic where the TALL masks of at least k tasks agree"
    weight: tuple[float, ...] = per_model(1.0, "factor of each task vector")
    threshold: tuple[float, ...] = per_model(0.4, "λ of the TALL mask; a larger λ gives a sparser mask", low=0)
    agree: int = param(2, "tasks that must use an entry", low=0, aliases=("k",))
    scale: float = param(1.0, "factor of the merged task vector", aliases=("lambda",))

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        deltas = [delta.mul_(weight) for delta, weight in zip(group.deltas(), self.weight, strict=True)]
        merged = deltas[0].clone()
        for delta in deltas[1:]:
            merged.add_(delta)
        counts = torch.zeros_like(merged)
        for delta, bound in zip(deltas, self.threshold, strict=True):
            rest = (merged - delta).abs_()
            # sgn(|Δ| − λ|ΣΔ − Δ|) is 1 exactly where the mask is.
            counts.add_(delta.abs_().sub_(rest, alpha=bound).sign_().clamp_(min=0))
        needed = min(self.agree, len(deltas))
        merged.mul_(counts.sub_(needed - 0.5).sign_().clamp_(min=0))
        return torch.add(group.anchor, merged, alpha=self.scale, out=merged)
