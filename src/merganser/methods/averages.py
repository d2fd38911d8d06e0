"""Averages of whole models, without a base or task vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.errors import RecipeError
from merganser.lazy import torch
from merganser.methods.base import Group, Method, Reduction
from merganser.methods.parameters import param, per_model
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ w θ."""
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total


def between(start: Tensor, end: Tensor, weight: float, finite: bool = True) -> Tensor:
    """Return (1 − w) a + w b. Equal entries stay exact, also infinite ones unless all are known to be `finite`."""
    mixed = torch.lerp(start, end, weight)
    if finite or not (lost := mixed.isnan()).any():
        return mixed
    # lerp computes a difference, which is NaN for infinities of one sign
    terms = [tensor * share for tensor, share in ((start, 1 - weight), (end, weight)) if share]
    return torch.where(lost, torch.where(start == end, start, sum(terms[1:], terms[0])), mixed)


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float], finite: bool = True) -> Tensor:
    """Return Σ w θ / Σ w, as a running mean if no weight is negative, so that equal tensors stay exact."""
    if min(weights) < 0:
        total = sum(weights)
        return weighted_sum(tensors, [weight / total for weight in weights])
    mean, total = None, 0.0
    for tensor, weight in zip(tensors, weights, strict=True):
        total += weight
        if weight > 0:
            mean = tensor if mean is None else between(mean, tensor, weight / total, finite)
    assert mean is not None, "the weights do not sum to zero"
    return mean


def cancel(weights: Sequence[float]) -> bool:
    """Return whether Σ w is zero up to the rounding of its terms, so that it cannot be a divisor."""
    return abs(sum(weights)) <= 1e-8 * sum(map(abs, weights))


@register
@dataclass(frozen=True)
class Linear(Method):
    """θ = Σ w θ_t / Σ w, or Σ w θ_t without `normalize`.

    With equal weights this is the uniform soup (Wortsman et al. 2022, arXiv:2203.05482).
    """

    name = "linear"
    summary = "weighted average of the models (uniform soup)"
    weight: tuple[float, ...] = per_model(1.0, "share of each model")
    normalize: bool = param(True, "divide by the sum of the weights")

    def __post_init__(self) -> None:
        if self.normalize and self.weight and cancel(self.weight):
            raise RecipeError("linear.weight: the weights sum to zero; change one, or set normalize to false")

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        if not self.normalize:
            return weighted_sum(group.models, self.weight)
        return weighted_mean(group.models, self.weight, group.finite)


@register
@dataclass(frozen=True)
class WiseFT(Method):
    """θ = (1 − α) θ_0 + α θ_1: from the base towards its fine-tuned model.

    Wortsman et al. 2022, Robust fine-tuning of zero-shot models (arXiv:2109.01903).
    """

    name = "wise_ft"
    summary = "interpolation between the base and one fine-tuned model, against forgetting"
    base = "required"
    models = (1, 1)
    alpha: float = param(0.5, "0 is the base, 1 the fine-tuned model")

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        return between(group.anchor, group.models[0], self.alpha, group.finite)


@register
@dataclass(frozen=True)
class Ema(Method):
    """θ ← d θ + (1 − d) θ_t over the checkpoints of one run, oldest first.

    The order matters. Polyak averaging and LAWA (the plain mean of the latest checkpoints) are `linear`.
    """

    name = "ema"
    summary = "exponential moving average over checkpoints of one run, oldest first"
    decay: float = param(0.9, "share of the average that remains at each checkpoint", low=0, high=1)

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        mean = group.models[0]
        for model in group.models[1:]:
            mean = between(mean, model, 1 - self.decay, group.finite)
        return mean


@register
@dataclass(frozen=True)
class Passthrough(Method):
    """θ = s θ_1: the tensor of the only model, unchanged unless scaled. Used to stack slices."""

    name = "passthrough"
    summary = "the only model unchanged or scaled, for stacking slices"
    models = (1, 1)
    scale: tuple[float | None, ...] = per_model(None, "factor; if absent the tensor is copied")

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        scale = self.scale[0]
        return group.models[0] if scale is None else group.models[0] * scale
