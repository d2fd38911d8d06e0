"""Localize-and-Stitch: the few entries that carry each task, put back into the base side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from merganser.lazy import torch
from merganser.methods.base import Blocks, Group, State
from merganser.methods.global_trim import global_cutoffs, local_cutoffs
from merganser.methods.norms import TaskVectorMethod
from merganser.methods.parameters import param, per_model
from merganser.methods.registry import register
from merganser.methods.sparsify import Band

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class LocalizeStitch(TaskVectorMethod):
    """θ = θ_0 + λ Σ_t γ_t ⊙ w_tΔ_t / Σ_t γ_t, γ_t the mask of the `density` largest entries of Δ_t in the whole model.

    An entry that one task localised keeps its value, one that several did is their mean. He et al. 2025,
    Localize-and-Stitch (arXiv:2408.13656): the dataless variant, density 0.05; with data they learn masks of 0.01.
    `scope: tensor` keeps the same share of every tensor.
    """

    name = "localize_stitch"
    summary = "the largest entries of each task vector stitched into the base, averaged where they overlap"
    reach = "reduce_map"
    weight: tuple[float, ...] = per_model(1.0, "factor of each task vector")
    density: tuple[float, ...] = per_model(0.05, "share of entries localised, the largest", low=0, high=1)
    scale: float = param(1.0, "factor of the merged task vector", aliases=("lambda",))
    scope: str = param("global", "rank entries per tensor or over the whole model", choices=("tensor", "global"))

    def needs_preparation(self) -> bool:
        return self.scope == "global"

    def prepare(self, tensors: Iterable[tuple[Mapping[str, Any], Blocks]]) -> State:
        return global_cutoffs(tensors, self.density)

    def reduce(self, blocks: Blocks) -> State:
        if self.scope == "tensor":
            return self._band.survey(blocks)
        return self._band.with_cutoffs(blocks, local_cutoffs(blocks[0].prepared, blocks[0].name))

    def merge(self, group: Group, state: State = None) -> Tensor:
        band = self._band
        deltas = [band.thin_(delta, group, t, state) for t, delta in enumerate(group.deltas())]
        merged, overlap = torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])
        for delta, weight in zip(deltas, self.weight, strict=True):
            merged.add_(delta, alpha=weight)
            overlap.add_(delta.sign_().abs_())
        merged.div_(overlap.clamp_(min=1))
        return torch.add(group.anchor, merged, alpha=self.scale, out=merged)

    @property
    def _band(self) -> Band:
        return Band(self.density, (0.0,) * len(self.density))
