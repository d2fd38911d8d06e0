"""Averages weighted by statistics of data: Fisher information and Gram matrices, from side checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.checkpoints.base import TensorSpec
from merganser.lazy import torch
from merganser.methods.averages import weighted_mean
from merganser.methods.base import Group, Method, Reduction
from merganser.methods.parameters import param, per_model
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class Fisher(Method):
    """θ = Σ w F_t ⊙ θ_t / Σ w F_t, F_t the diagonal Fisher information of model t (statistics `fisher`).

    Matena and Raffel 2022 (arXiv:2111.09832). F is the mean of squared gradients of log p, one example at a time.
    Entries where every F is zero, and tensors without F, are averaged by the weights.
    """

    name = "fisher"
    summary = "average weighted by diagonal Fisher information"
    statistics = ("fisher",)
    weight: tuple[float, ...] = per_model(1.0, "factor of each model's information", low=0)

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        weights = self.weight if sum(self.weight) > 0 else [1.0] * len(group.models)
        mean = weighted_mean(group.models, weights, group.finite)
        information = group.statistics.get("fisher")
        if not information:
            return mean
        pull, mass = torch.zeros_like(mean), torch.zeros_like(mean)
        for model, fisher, weight in zip(group.models, information, self.weight, strict=True):
            weighted = fisher.to(mean) * weight
            pull.addcmul_(weighted, model - mean)
            mass.add_(weighted)
        return pull.div_(mass).masked_fill_(mass == 0, 0).add_(mean)


@register
@dataclass(frozen=True)
class RegMean(Method):
    """W = (Σ w W_t G_t)(Σ w G_t)⁺ with G_t = XᵀX/N of the inputs of a linear layer, off-diagonals scaled by α.

    This is the least-squares fit to every model's outputs on its own data. Jin et al. 2023 (arXiv:2212.09849). It is
    solved for the difference from the mean, in float64: directions in which no model saw data, and tensors without Gram
    matrices (statistics `gram`), are averaged.
    """

    name = "regmean"
    summary = "linear layers fitted to all models' outputs by their inputs' Gram matrices"
    reach = "whole"
    statistics = ("gram",)
    weight: tuple[float, ...] = per_model(1.0, "factor of each model's Gram matrix", low=0)
    alpha: float = param(0.9, "factor of the off-diagonal entries of the Gram matrices", low=0, high=1)

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        weights = self.weight if sum(self.weight) > 0 else [1.0] * len(group.models)
        mean = weighted_mean(group.models, weights, group.finite)
        grams = group.statistics.get("gram")
        if not grams or mean.dim() != 2:
            return mean
        shrunk = [self._shrink(gram.double(), weight) for gram, weight in zip(grams, self.weight, strict=True)]
        pull, whole = torch.zeros_like(mean, dtype=torch.float64), torch.zeros_like(shrunk[0])
        for model, gram in zip(group.models, shrunk, strict=True):
            pull += (model - mean).double() @ gram
            whole += gram
        inverse: Tensor = torch.linalg.pinv(whole, hermitian=True)
        return mean + (pull @ inverse).to(mean.dtype)

    @classmethod
    def statistic_shape(cls, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return gram_shape(shape)

    def _shrink(self, gram: Tensor, weight: float) -> Tensor:
        return (gram * self.alpha + torch.diag(gram.diagonal() * (1 - self.alpha))) * weight

    def scratch(self, spec: TensorSpec, models: int) -> int:
        columns = spec.shape[-1] if spec.shape else 1
        return 8 * (2 * spec.numel + (models + 4) * columns * columns)


def gram_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the Gram matrix of a linear layer's inputs, for weights of this shape."""
    return (shape[-1], shape[-1]) if shape else ()
