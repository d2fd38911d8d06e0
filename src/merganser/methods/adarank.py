"""AdaRank: task matrices with individually selected singular components."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.checkpoints.base import TensorSpec
from merganser.kernels.spectra import top_svd
from merganser.lazy import torch
from merganser.methods.base import Group, Reduction
from merganser.methods.matrices import matrix_shape
from merganser.methods.norms import TaskVectorMethod
from merganser.methods.parameters import param, per_model
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class AdaRank(TaskVectorMethod):
    """θ = θ_0 + λ Σ_t w_t U_t diag(c_t ⊙ σ_t) V_tᵀ, Δ_t = U_t diag(σ_t) V_tᵀ, c_t the factor of every component.

    c_t (statistics `components`) is 0 for pruned components and the coefficient of the tensor for the others;
    `mg.tuning.adarank` learns it on unlabelled inputs. Vectors are matrices with a single component. Tensors without
    `components` keep all of them, with the factor `otherwise`. Lee et al. 2026, AdaRank (arXiv:2503.22178).
    """

    name = "adarank"
    summary = "task vectors with chosen singular components, learned by mg.tuning.adarank"
    reach = "whole"
    statistics = ("components",)
    weight: tuple[float, ...] = per_model(1.0, "factor of each task vector")
    scale: float = param(1.0, "factor of the merged task vector", aliases=("lambda",))
    otherwise: float = param(0.3, "factor of the task vectors of tensors without components")

    @classmethod
    def statistic_shape(cls, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (components(shape),)

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        chosen = group.statistics.get("components")
        merged = torch.zeros_like(group.anchor, dtype=torch.float64)
        for index, (delta, weight) in enumerate(zip(group.deltas(), self.weight, strict=True)):
            if chosen is None:
                merged.add_(delta, alpha=weight * self.otherwise)
            else:
                merged.add_(select(delta.double(), chosen[index].double()), alpha=weight)
        return torch.add(group.anchor, merged.to(group.anchor.dtype), alpha=self.scale)

    def scratch(self, spec: TensorSpec, models: int) -> int:
        d, m = matrix_shape(spec.shape)
        return spec.nbytes * models + 8 * (4 * spec.numel + 2 * min(d, m) * (d + m))


def components(shape: tuple[int, ...]) -> int:
    """Return the number of singular components of a tensor of this shape; a vector has one."""
    return min(matrix_shape(shape))


def select(delta: Tensor, factors: Tensor) -> Tensor:
    """Return Δ with each singular component multiplied by its factor."""
    if factors.numel() == 1:
        return delta * factors.squeeze()
    found = top_svd(delta.flatten(1), factors.numel())
    return ((found.u * (found.s * factors[: found.rank])) @ found.v.T).view_as(delta)
