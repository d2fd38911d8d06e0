"""Reinforced agent merging: entries that one model changed are kept, entries that several changed are averaged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.kernels.spheres import nonzero
from merganser.lazy import torch
from merganser.methods.base import Blocks, Group, Reduction
from merganser.methods.norms import TaskVectorMethod
from merganser.methods.parameters import param
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class Ram(TaskVectorMethod):
    """θ = θ_0 + Σ_t Δ̂_t / c, Δ̂_t the entries of Δ_t with |Δ_t| > ε and c the number of models that have one.

    Made for sparse task vectors of reinforcement learning, which averaging would dilute: an entry that only one model
    changed is kept in full. Reinforced Agent Merging (arXiv:2601.13572).
    """

    name = "ram"
    summary = "entries changed by one model kept, entries changed by several averaged"
    epsilon: float = param(1e-5, "changes up to this size do not count", low=0)
    scale: float = param(1.0, "factor of the merged task vector", aliases=("lambda",))

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        changes, counts = self.changes(group)
        unique = unique_(counts.clone())
        merged = torch.zeros_like(counts)
        for t, change in enumerate(changes):
            if state is not None:
                # 1 on shared entries, the model's own gain on unique ones.
                change.addcmul_(change, unique, value=state[t] - 1)
            merged.add_(change)
        merged.div_(counts.clamp_(min=1))
        return torch.add(group.anchor, merged, alpha=self.scale, out=merged)

    def changes(self, group: Group) -> tuple[list[Tensor], Tensor]:
        """Return the task vectors without negligible entries, and how many models changed each entry."""
        changes = [torch.hardshrink(delta, self.epsilon) for delta in group.deltas()]
        counts = changes[0].sign().abs_()
        for change in changes[1:]:
            counts.add_(change.sign().abs_())
        return changes, counts


def unique_(counts: Tensor) -> Tensor:
    """Return 1 where the count is 1, else 0: max(0, 1 − |c − 1|)."""
    return counts.sub_(1).abs_().neg_().add_(1).clamp_(min=0)


@register
@dataclass(frozen=True)
class RamPlus(Ram):
    """RAM with the unique entries of each model amplified by 1 + r · min(ρ, α), to compensate for the averaging.

    ρ is the ratio of shared to unique changed entries of the model in this tensor (the tensor-local variant, as in
    mergekit). Reinforced Agent Merging (arXiv:2601.13572).
    """

    name = "ram_plus"
    summary = "ram with unique entries amplified if many are shared"
    reach = "reduce_map"
    also = ("ramplus_tl",)
    r: float = param(0.1, "strength of the amplification", low=0)
    alpha: float = param(0.2, "bound of the ratio of shared to unique entries", low=0)

    def reduce(self, blocks: Blocks) -> Reduction:
        """Return the gain of each model."""

        def count(group: Group) -> list[int]:
            changes, counts = self.changes(group)
            unique = unique_(counts)
            found = []
            for change in changes:
                found.append(nonzero(change))
                found.append(nonzero(change.mul_(unique)))
            return found

        sums = [sum(column) for column in zip(*blocks.map(count), strict=True)]
        gains = []
        for changed, unique in zip(sums[::2], sums[1::2], strict=True):
            shared = changed - unique
            gains.append(1 + self.r * min(shared / unique if unique else math.inf, self.alpha) * (shared > 0))
        return gains
