"""SCE: select, calculate, erase."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.kernels.selection import Cutoff, largest_share
from merganser.kernels.spheres import total
from merganser.lazy import torch
from merganser.methods.base import Blocks, Group, Reduction
from merganser.methods.consensus import elected_mean_
from merganser.methods.norms import TaskVectorMethod
from merganser.methods.parameters import param
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class Sce(TaskVectorMethod):
    """Keep the entries of the task vectors with the largest variance, weigh models by mean Δ², erase minority signs.

    θ = θ_0 + λ Σ_{t ∈ A} w_t Δ_t / Σ_{t ∈ A} w_t on the selected entries, w_t ∝ mean(Δ_t²) over the tensor,
    A the models with sgn Δ_t = sgn ΣΔ_t. Wan et al. 2024, FuseChat (arXiv:2408.07990).

    `select_topk` is a share of the entries with any variance; ties are broken by position. mergekit falls back to equal
    weights where Σ mean(Δ²) < 1e-6, which is common in fine-tuned models; here weights follow the formula at any scale.
    """

    name = "sce"
    summary = "select entries of high variance, weigh models by energy, erase minority signs"
    reach = "reduce_map"
    select_topk: float = param(1.0, "share of the entries kept, those of largest variance", low=0, high=1)
    scale: float = param(1.0, "factor of the merged task vector", aliases=("lambda",))

    def reduce(self, blocks: Blocks) -> Reduction:
        """Return the cutoff of variance, if any, and the weights of the models."""
        cutoff = self._cutoff(blocks) if self.select_topk < 1 else None
        squares = blocks.map(lambda group: [total(delta * delta) for delta in self._selected(group, cutoff)])
        sums = [math.fsum(column) for column in zip(*squares, strict=True)]
        whole = math.fsum(sums)
        return cutoff, [s / whole for s in sums] if whole > 0 else [1 / len(sums)] * len(sums)

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        cutoff, weights = state
        deltas = self._selected(group, cutoff)
        signs = deltas[0].clone()
        for delta in deltas[1:]:
            signs.add_(delta)
        merged = elected_mean_(deltas, weights, votes=signs)
        return torch.add(group.anchor, merged, alpha=self.scale, out=merged)

    def _cutoff(self, blocks: Blocks) -> Cutoff:
        numel = math.prod(blocks.shape)
        return largest_share(blocks, lambda group: _variance(group.deltas()), self.select_topk, numel)

    def _selected(self, group: Group, cutoff: Cutoff | None) -> list[Tensor]:
        deltas = group.deltas()
        if cutoff is not None:
            mask = cutoff.mask(_variance(deltas), group.offset)
            for delta in deltas:
                delta.mul_(mask)
        return deltas


def _variance(deltas: list[Tensor]) -> Tensor:
    """Return the variance over models times T, from exact differences: equal task vectors have variance 0."""
    mean = deltas[0]
    for count, delta in enumerate(deltas[1:], start=2):
        mean = torch.lerp(mean, delta, 1 / count)
    spread = torch.zeros_like(mean)
    for delta in deltas:
        away = delta - mean
        spread.addcmul_(away, away)
    return spread
