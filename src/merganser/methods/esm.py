"""ESM: task matrices restricted to the directions in which they change their layer's output, then orthogonalised."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import TensorSpec
from merganser.kernels.polar import TOLERANCE
from merganser.lazy import torch
from merganser.methods.base import Blocks, Group, Reduction
from merganser.methods.informed import gram_shape
from merganser.methods.isotropic import flatten_spectrum
from merganser.methods.matrices import FLOOR, MatrixRule, WeightedDeltas, matrix_shape, rank_kept
from merganser.methods.parameters import param
from merganser.methods.registry import register
from merganser.methods.tsv import merge_tasks

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class ESM(MatrixRule):
    """M = flat([P_1 … P_T]) · flat([A_1; …; A_T]), P_t the top eigenvectors of Δ_t G_t Δ_tᵀ and A_t = P_tᵀ Δ_t.

    With the Gram matrix G_t of a layer's inputs (statistics `gram`), P_t are the principal directions of the change
    X Δ_tᵀ of its output, ⌊rows/T⌋ a task. flat(·) is the polar factor times the mean singular value. Matrices without
    Gram matrices are merged by TSV-Merge, everything else is averaged.

    Polarised scaling emphasises strong parts, by the ratio of norms to their mean to the `power`: of A_t among the
    tasks, of the columns of [A_1; …; A_T], and of M among matrices whose names differ only in numbers, such as those of
    other layers. Li et al. 2026, Model Merging in the Essential Subspace (arXiv:2602.20208): power 2; 32 unlabelled
    inputs per task are enough. Their code doubles M, which is left to `scale`.
    """

    name = "esm"
    summary = "task matrices in the principal directions of their outputs' change, orthogonalised"
    statistics = ("gram",)

    rank_fraction: float | None = param(None, "share of the directions kept per model; 1/T if absent", low=0, high=1)
    power: float = param(2.0, "exponent of the polarised scaling; 0 turns it off", low=0)
    tolerance: float = param(TOLERANCE, "relative size below which a direction counts as absent", low=0, high=1)

    @classmethod
    def statistic_shape(cls, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return gram_shape(shape)

    def needs_preparation(self) -> bool:
        return self.power > 0

    def prepare(self, tensors: Iterable[tuple[Mapping[str, Any], Blocks]]) -> Reduction:
        """Return the scale of every matrix among those of the same kind."""
        norms: dict[str, dict[str, float]] = {}
        for _, blocks in tensors:
            if len(blocks) and blocks[0].statistics.get("gram") and self.applies(blocks.name, blocks.shape):
                norm = float(self._essential(blocks[0]).norm())
                norms.setdefault(re.sub(r"\d+", "#", blocks.name), {})[blocks.name] = norm
        return {
            name: ratio for kind in norms.values() for name, ratio in zip(kind, self._polar(kind.values()), strict=True)
        }

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        if not group.statistics.get("gram") or not self.applies(group.name, group.shape or tuple(group.anchor.shape)):
            return super().merge(group)
        layer = (group.prepared or {}).get(group.name, 1.0)
        merged = self._essential(group).to(group.anchor.dtype)
        return torch.add(group.anchor, merged, alpha=self.scale * layer)

    def combine(self, deltas: WeightedDeltas) -> Tensor:
        """Apply TSV-Merge to matrices whose inputs are not known."""
        k = rank_kept(min(deltas.shape), len(deltas), self.rank_fraction)
        return merge_tasks(deltas, k, "polar", self.tolerance)

    def scratch(self, spec: TensorSpec, models: int) -> int:
        """Return the memory of all tasks' factors, one task's matrices, and the statistics, which come with the
        tensor.
        """
        d, m = matrix_shape(spec.shape)
        return 8 * (4 * d * d + (models + 2) * m * m + 6 * d * m)

    def _essential(self, group: Group) -> Tensor:
        deltas = WeightedDeltas(group, self.weight or (1.0,) * len(group.models))
        k = rank_kept(deltas.shape[0], len(deltas), self.rank_fraction)
        bases, coordinates = [], []
        for delta, gram in zip(deltas, group.statistics["gram"], strict=True):
            basis = essential_directions(delta.double(), gram.double(), k)
            bases.append(basis)
            coordinates.append(basis.T @ delta.double())
        sizes = self._polar(float(part.norm()) for part in coordinates)
        rows = torch.cat([part * size for part, size in zip(coordinates, sizes, strict=True)])
        if not rows.numel() or not bool(rows.any()):
            return deltas.zeros(torch.float64)
        columns = rows.norm(dim=0)
        rows = rows * (columns / columns.mean()) ** self.power
        return flatten_spectrum(torch.cat(bases, dim=1), self.tolerance) @ flatten_spectrum(rows, self.tolerance)

    def _polar(self, norms: Iterable[float]) -> list[float]:
        """Return (norm / mean norm) to the power."""
        found: Sequence[float] = list(norms)
        mean = sum(found) / max(1, len(found))
        return [(norm / mean) ** self.power if mean else 1.0 for norm in found]


def essential_directions(delta: Tensor, gram: Tensor, k: int) -> Tensor:
    """Return the top-k eigenvectors of Δ G Δᵀ as columns, without those due to rounding."""
    vectors: Tensor
    values, vectors = torch.linalg.eigh(delta @ gram @ delta.T)
    kept = min(k, int((values > FLOOR**2 * values[-1].clamp(min=0)).sum())) if float(values[-1]) > 0 else 0
    return vectors[:, len(values) - kept :].flip(1)
