"""OPCM: continual merging; each model is projected off what was merged before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from merganser.checkpoints.base import TensorSpec
from merganser.errors import RecipeError
from merganser.kernels.spectra import top_svd
from merganser.lazy import torch
from merganser.methods.base import Blocks, Group, Reduction
from merganser.methods.matrices import MatrixRule, WeightedDeltas, matrix_shape
from merganser.methods.parameters import param
from merganser.methods.registry import register
from merganser.methods.spectral import reaching

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class OPCM(MatrixRule):
    """S_1 = Δ_1, S_t = S_{t−1} + P_{t−1}(Δ_t), and θ = θ_0 + S_T · mean_t ‖Δ_t‖ / ‖S_T‖: the order matters.

    With S = U Σ Vᵀ, P(Δ) is Δ without the leading block of UᵀΔV (the fewest directions that hold `share` of ‖S‖_*) and
    without its diagonal, so that ⟨S, P(Δ)⟩ = 0. All other tensors are added unchanged. Norms are of the whole model, or
    of each tensor with `scope: tensor`. Tang et al. 2025, Merging on the Fly (arXiv:2501.09522).

    To add an expert to an earlier result without its experts, give the result as the first model, `merged: k` for the k
    experts it contains, and `gain`, its λ_k = ‖S_k‖ / mean ‖Δ_t‖ (√k, if every expert adds something new).
    `mg.tuning.Continual` keeps track of both.
    """

    name = "opcm"
    summary = "continual merging: experts are added one by one, each projected off the merged ones"

    share: float = param(0.5, "share of the nuclear norm whose directions are closed to the next model", low=0, high=1)
    scope: Literal["tensor", "global"] = param(
        "global", "take norms per tensor or over the whole model", choices=("tensor", "global")
    )
    merged: int = param(1, "number of experts in the first model", low=1)
    gain: float | None = param(None, "λ of the first model if it contains several; √merged if absent", low=0)

    def needs_preparation(self) -> bool:
        return self.scope == "global"

    def prepare(self, tensors: Iterable[tuple[Mapping[str, Any], Blocks]]) -> Reduction:
        """Return the squared norms of S and of each model's task vector, over all tensors."""
        sums: list[float] = []
        for _, blocks in tensors:
            if len(blocks) and math.prod(blocks.shape):
                own = self._squares(blocks[0], self._accumulate(blocks[0]))
                if sums and len(sums) != len(own):
                    raise RecipeError("method 'opcm': tensors are merged from different models; set scope to 'tensor'")
                sums = [a + b for a, b in zip(sums or [0.0] * len(own), own, strict=True)]
        return sums

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        total = self._accumulate(group)
        squares = group.prepared if self.scope == "global" else self._squares(group, total)
        factor = self.scale / self.next_gain(squares) if squares and squares[0] > 0 else 0.0
        return torch.add(group.anchor, total.to(group.anchor.dtype), alpha=factor)

    def next_gain(self, squares: list[float]) -> float:
        """Return λ = ‖S‖ / mean ‖Δ_t‖ from the squared norms that `prepare` returns."""
        total, first, *others = (math.sqrt(square) for square in squares)
        # The norm of an earlier result is the mean norm of its experts.
        mean = (self.merged * first + math.fsum(others)) / (self.merged + len(others))
        return total / mean if mean > 0 else 1.0

    def combine(self, deltas: WeightedDeltas) -> Tensor:
        """Return S_T of matrices."""
        total: Tensor = self._first_gain * deltas[0].double()
        for index in range(1, len(deltas)):
            total = total + project(deltas[index].double(), total, self.share)
        return total

    def accumulate(self, name: str, total: Tensor, delta: Tensor) -> Tensor:
        """Return S_t from S_{t−1} and the next task vector, both in float64."""
        matrix = self.applies(name, tuple(delta.shape))
        return total + (project(delta.flatten(1), total.flatten(1), self.share).view_as(delta) if matrix else delta)

    def scratch(self, spec: TensorSpec, models: int) -> int:
        """Return the memory of S, its factors, and a task matrix in float64, also in the basis of S."""
        d, m = matrix_shape(spec.shape)
        return 8 * (5 * spec.numel + 2 * min(d, m) * (d + m))

    @property
    def _first_gain(self) -> float:
        return 1.0 if self.merged == 1 else self.gain or math.sqrt(self.merged)

    def _accumulate(self, group: Group) -> Tensor:
        deltas = WeightedDeltas(group, self.weight or (1.0,) * len(group.models))
        if self.applies(group.name, group.shape or tuple(group.anchor.shape)):
            return self.combine(deltas).view(group.anchor.shape)
        first, *others = deltas.full()
        return sum((delta.double() for delta in others), self._first_gain * first.double())

    def _squares(self, group: Group, total: Tensor) -> list[float]:
        deltas = WeightedDeltas(group, self.weight or (1.0,) * len(group.models))
        norms = [float(delta.double().square().sum()) for delta in deltas.full()]
        return [float(total.square().sum()), *norms]


def project(delta: Tensor, merged: Tensor, share: float) -> Tensor:
    """Return Δ without its leading block and its diagonal in the singular basis of `merged`."""
    basis = top_svd(merged, min(merged.shape))
    if not basis.rank:
        return delta
    k = reaching(basis.s, share) if share > 0 else 0
    inside = basis.u.T @ delta @ basis.v
    shared = torch.diag_embed(inside.diagonal())
    shared[:k, :k] = inside[:k, :k]
    return delta - basis.u @ shared @ basis.v.T
