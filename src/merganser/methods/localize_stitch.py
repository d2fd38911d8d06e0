"""Localize-and-Stitch: the few important entries of each task vector, added to the base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.lazy import torch
from merganser.methods.parameters import param, per_model
from merganser.methods.registry import register
from merganser.methods.task_vectors import Trimmed

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class LocalizeStitch(Trimmed):
    """θ = θ_0 + λ Σ_t γ_t ⊙ w_tΔ_t / Σ_t γ_t, γ_t the mask of the `density` largest entries of Δ_t in the whole model.

    An entry localised by one task keeps its value, one localised by several is their mean. He et al. 2025,
    Localize-and-Stitch (arXiv:2408.13656): the dataless variant, density 0.05; with data they learn masks of 0.01.
    """

    name = "localize_stitch"
    summary = "the largest entries of each task vector stitched into the base, averaged where they overlap"
    normalize: bool = param(True, "average instead of add entries that several models localised")
    density: tuple[float, ...] = per_model(0.05, "share of entries localised, the largest", low=0, high=1)
    scope: str = param("global", "rank entries per tensor or over the whole model", choices=("tensor", "global"))

    def consensus(self, deltas: list[Tensor]) -> Tensor:
        merged, overlap = torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])
        for delta, weight in zip(deltas, self.weight, strict=True):
            merged.add_(delta, alpha=weight)
            overlap.add_(delta.sign_().abs_())
        return merged.div_(overlap.clamp_(min=1)) if self.normalize else merged
