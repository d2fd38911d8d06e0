"""WUDI: a merged task matrix that interferes least with each task in that task's input space."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from merganser.checkpoints.base import TensorSpec
from merganser.kernels.leading import LARGE
from merganser.kernels.spectra import gram, mirror, product
from merganser.lazy import torch
from merganser.methods.matrices import MatrixRule, WeightedDeltas, matrix_shape, sum_of
from merganser.methods.parameters import param
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

#: Damping from which the minimum is well-conditioned enough for float32.
DAMPED = 1e-3


@register
@dataclass(frozen=True)
class WUDI(MatrixRule):
    """min_τ Σ_t ‖(τ − τ_t) τ_tᵀ‖² / ‖τ_t‖², starting from τ⁰ = Σ τ_t.

    With C_t = τ_tᵀτ_t/‖τ_t‖² and C = Σ C_t the minimum solves τ C = Σ τ_t C_t. The plain pseudo-inverse amplifies
    directions that hardly any task uses; the published iteration keeps those close to the sum. `closed` achieves the
    same in one step, as the minimum with a penalty on the distance from the sum: τ = τ⁰ + (Σ τ_t C_t − τ⁰ C)(C + ρ ‖C‖
    I)⁻¹ with ρ = `damping`. `iterative` is Adam on the objective.
    Cheng et al. 2025, WUDI-Merging (arXiv:2503.08099).
    """

    name = "wudi"
    summary = "least interference in the input space of each task, data-free"

    solver: Literal["closed", "iterative"] = param(
        "closed", "regularised solution, or gradient steps from the sum", choices=("closed", "iterative")
    )
    damping: float = param(1e-2, "strength of the pull towards the sum, relative to the spectrum", low=1e-9)
    steps: int = param(300, "steps of the iterative solver", low=0)
    learning_rate: float = param(1e-5, "learning rate of the iterative solver", low=0)

    def combine(self, deltas: WeightedDeltas) -> Tensor:
        total = sum_of(iter(deltas)).to(self._precision(deltas))
        columns = total.shape[1]
        curvature = total.new_zeros(columns, columns)
        target = torch.zeros_like(total)
        for delta in deltas:
            wide = delta.to(total.dtype)
            norm = float(torch.linalg.vector_norm(delta, dtype=torch.float64))
            if 0 < norm < math.inf:  # a difference that overflowed makes the sum infinite, which is refused
                own = mirror(gram(wide / norm, dtype=wide.dtype))  # of unit length: squares of weights may not fit
                curvature += own
                product(wide, own, target)
        solve = self._closed if self.solver == "closed" else self._descend
        return solve(total, curvature, target).to(deltas.dtype)

    def _precision(self, deltas: WeightedDeltas) -> torch.dtype:
        """Return float32 for large matrices if it is enough: the penalty limits the condition of C + ρ ‖C‖ I to 1/ρ."""
        narrow = self.solver == "closed" and self.damping >= DAMPED and deltas.dtype == torch.float32
        return torch.float32 if narrow and min(deltas.shape) >= LARGE else torch.float64

    def scratch(self, spec: TensorSpec, models: int) -> int:
        """Return the memory of squares of the input side, besides a few matrices."""
        columns = matrix_shape(spec.shape)[1]
        return 8 * (6 * spec.numel + 4 * columns * columns)

    def _closed(self, total: Tensor, curvature: Tensor, target: Tensor) -> Tensor:
        size = curvature.norm()
        if not size > 0:
            return total
        ridge = curvature.clone()
        ridge.diagonal().add_(self.damping * size)
        gap = product(total, curvature, target, scale=-1.0)
        return total + torch.cholesky_solve(gap.T, torch.linalg.cholesky(ridge)).T

    def _descend(self, total: Tensor, curvature: Tensor, target: Tensor) -> Tensor:
        merged = total.clone()
        first, second = torch.zeros_like(total), torch.zeros_like(total)
        for step in range(1, self.steps + 1):
            gradient = 2 * (merged @ curvature - target)
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.001)
            scale = (second / (1 - 0.999**step)).sqrt_().add_(1e-8)
            merged.addcdiv_(first, scale, value=-self.learning_rate / (1 - 0.9**step))
        return merged
