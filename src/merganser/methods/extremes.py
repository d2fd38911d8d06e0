"""Rules that choose one value per entry among the task vectors instead of averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from merganser.lazy import torch
from merganser.methods.base import Group, Reduction
from merganser.methods.norms import TaskVectorMethod
from merganser.methods.parameters import param, per_model
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Extremes(TaskVectorMethod):
    """The largest or the smallest value of each entry; one of the two has the largest magnitude."""

    #: Whether the sign of ΣΔ decides between the two, or the magnitude.
    elects: ClassVar[bool]

    weight: tuple[float, ...] = per_model(1.0, "factor of each task vector")
    scale: float = param(1.0, "factor of the merged task vector", aliases=("lambda",))

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        deltas = [delta.mul_(weight) for delta, weight in zip(group.deltas(), self.weight, strict=True)]
        high, low = deltas[0].clone(), deltas[0].clone()
        for delta in deltas[1:]:
            torch.maximum(high, delta, out=high)
            torch.minimum(low, delta, out=low)
        if self.elects:
            side = deltas[0]
            for delta in deltas[1:]:
                side.add_(delta)
            side.sign_()
        else:
            side = high.add(low).sign_().add_(0.5).sign_()
        # Factors of 0 and 1 select exactly, and many times faster than `where`.
        merged = high.mul_(side.clamp(min=0)).sub_(low.mul_(side.clamp_(max=0)))
        return torch.add(group.anchor, merged, alpha=self.scale, out=merged)


@register
@dataclass(frozen=True)
class MagMax(Extremes):
    """θ = θ_0 + λ Δ_{t*}, t* = argmax_t |Δ_t| for each entry; of opposite equals the positive one.

    Marczak et al. 2024, MagMax (arXiv:2407.06322).
    """

    name = "magmax"
    summary = "for each entry, the value of largest magnitude"
    elects = False


@register
@dataclass(frozen=True)
class Emr(Extremes):
    """θ = θ_0 + λ τ: of each entry the sign of ΣΔ_t and, among the models that have it, the largest magnitude.

    τ is the unified task vector of Huang et al. 2024, EMR-Merging (arXiv:2405.17461), whose masks and rescalers per
    task are no part of a static merge.
    """

    name = "emr"
    summary = "for each entry, the largest magnitude with the elected sign (EMR's unified task vector)"
    elects = True
