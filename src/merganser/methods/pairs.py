"""Rules between the base and one model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.kernels.arrays import AnyArray
from merganser.kernels.divergence import divergences
from merganser.kernels.selection import largest
from merganser.kernels.spheres import scale_rows_
from merganser.lazy import np, torch
from merganser.methods.base import Blocks, Group, Method, Reduction
from merganser.methods.parameters import param
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class NearSwap(Method):
    """θ = θ_0 + w (θ_1 − θ_0) with w = min(1, t / |θ_1 − θ_0|): the model where it is close, a step of t elsewhere.

    This is θ_0 + clip(θ_1 − θ_0, −t, t). From the model card of QuartetAnemoi-70B (alchemonaut 2024).
    """

    name = "nearswap"
    summary = "the other model where it is within t of the base, a step of t toward it elsewhere"
    base = "required"
    models = (1, 1)
    t: float = param(help="largest change of a weight", low=0)

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        (delta,) = group.deltas()
        return delta.clamp_(-self.t, self.t).add_(group.anchor)


@register
@dataclass(frozen=True)
class ArceeFusion(Method):
    """θ = θ_0 + Δ where |Δ| · KL(softmax θ_1 ‖ softmax θ_0) ≥ median + 1.5 (q₃ − q₁) of that importance.

    The divergence is of vectors along the last axis; median and quartiles are those of the whole tensor, exactly
    (mergekit samples a million entries of larger tensors). From mergekit 0.1.
    """

    name = "arcee_fusion"
    summary = "the task vector where its importance is far above the median"
    reach = "reduce_map"
    base = "required"
    models = (1, 1)

    def reduce(self, blocks: Blocks) -> Reduction:
        """Return the threshold, and the divergence of every vector."""
        numel = math.prod(blocks.shape)
        if numel == 0:
            return math.inf, None
        divergence = self._divergences(blocks)
        ranks = [numel - int(share * (numel - 1)) for share in (0.25, 0.5, 0.75)]
        (cutoffs,) = largest(blocks, lambda group: [_importance(group, divergence)], [ranks], numel)
        kind = divergence.dtype.type
        first, median, third = (kind(cutoff.value) for cutoff in cutoffs)
        return float(median + kind(1.5) * (third - first)), divergence

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        bound, divergence = state
        (delta,) = group.deltas()
        if divergence is None:
            return group.anchor
        return delta.mul_(_importance(group, divergence) >= bound).add_(group.anchor)

    def _divergences(self, blocks: Blocks) -> AnyArray:
        length = _length(blocks.shape)
        if len(blocks.shape) > 1 or len(blocks) == 1:
            return np.concatenate(blocks.map(lambda group: divergences(group.models[0], group.anchor, length)))
        parts = blocks.map(lambda group: (group.models[0].reshape(-1), group.anchor.reshape(-1)))
        model, base = (torch.cat(side) for side in zip(*parts, strict=True))
        return divergences(model, base, length)


def _importance(group: Group, divergence: AnyArray) -> Tensor:
    (delta,) = group.deltas()
    return scale_rows_(delta.abs_(), divergence, group.offset, _length(group.shape))


def _length(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1
