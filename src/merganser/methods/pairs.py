"""Rules between the base and one model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.kernels.selection import largest
from merganser.kernels.spheres import scale_rows_
from merganser.lazy import torch
from merganser.methods.base import Blocks, Group, Method, State
from merganser.methods.parameters import param
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

#: Entries of the rows whose divergence is computed at a time.
_CACHED = 1 << 18


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

    def merge(self, group: Group, state: State = None) -> Tensor:
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

    def reduce(self, blocks: Blocks) -> State:
        """Return the threshold, and the divergence of every vector."""
        numel = math.prod(blocks.shape)
        if numel == 0:
            return math.inf, None
        divergence = self._divergences(blocks)
        ranks = [numel - int(share * (numel - 1)) for share in (0.25, 0.5, 0.75)]
        (cutoffs,) = largest(blocks, lambda group: [_importance(group, divergence)], [ranks], numel)
        first, median, third = (divergence.new_tensor(cutoff.value) for cutoff in cutoffs)
        return float(median + 1.5 * (third - first)), divergence

    def merge(self, group: Group, state: State = None) -> Tensor:
        bound, divergence = state
        (delta,) = group.deltas()
        if divergence is None:
            return group.anchor
        return delta.mul_(_importance(group, divergence) >= bound).add_(group.anchor)

    def _divergences(self, blocks: Blocks) -> Tensor:
        if len(blocks.shape) > 1:
            return torch.cat(blocks.map(lambda group: _divergence(group.models[0], group.anchor)))
        parts = blocks.map(lambda group: (group.models[0].reshape(-1), group.anchor.reshape(-1)))
        model, base = (torch.cat(side) for side in zip(*parts, strict=True))
        return _divergence(model, base)


def _importance(group: Group, divergence: Tensor) -> Tensor:
    (delta,) = group.deltas()
    return scale_rows_(delta.abs_(), divergence, group.offset, group.shape[-1] if group.shape else 1)


def _divergence(model: Tensor, base: Tensor) -> Tensor:
    """Return KL along the last axis, a few rows at a time, which stay in the cache, in float64: the divergence of
    usual fine-tunes is smaller than the rounding of a softmax in float32. Rounding can make it negative where the two
    are equal.
    """
    rows = max(1, _CACHED // max(1, model.shape[-1]))
    pairs = zip(*(torch.split(side.reshape(-1, side.shape[-1]), rows) for side in (model, base)), strict=True)
    parts = []
    for m, b in pairs:
        p, q = (torch.softmax(side, dim=-1, dtype=torch.float64).add_(1e-8) for side in (m, b))
        parts.append(torch.div(p, q, out=q).log_().mul_(p).sum(dim=-1))
    return torch.cat(parts).clamp_(min=0).to(model.dtype)
