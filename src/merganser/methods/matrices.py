"""The common part of rules that treat a tensor as a matrix."""

from __future__ import annotations

import fnmatch
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from merganser.checkpoints.base import TensorSpec
from merganser.lazy import torch
from merganser.methods.base import Group
from merganser.methods.norms import TaskVectorMethod
from merganser.methods.parameters import param, per_model

if TYPE_CHECKING:
    from torch import Tensor

A = TypeVar("A")
B = TypeVar("B")

#: Components below this share of σ₁ are rounding errors of float32 task vectors, without meaningful directions.
FLOOR = 1e-6


@dataclass(frozen=True)
class MatrixRule(TaskVectorMethod):
    """θ = θ₀ + scale · M(w₁Δ₁, …, w_TΔ_T) for matrices, and θ₀ + scale · mean(w_tΔ_t) for everything else.

    Everything else: vectors, scalars, tensors with more axes (unless `convolutions`), matrices with a single row or
    column, and names that match `exclude`.
    """

    reach = "whole"
    #: Whether nothing else holds what `combine` returns, so that the base may be added to it in place.
    fresh: ClassVar[bool] = False

    weight: tuple[float, ...] = per_model(1.0, "factor of each model's task vector")
    scale: float = param(1.0, "factor of the merged task vector", aliases=("lambda",))
    exclude: tuple[str, ...] = param((), "patterns of tensor names that are averaged instead")
    convolutions: bool = param(False, "treat kernels as matrices: output channels × everything else")

    def merge(self, group: Group, state: Any = None) -> Tensor:
        weights = self.weight or (1.0,) * len(group.models)
        deltas = WeightedDeltas(group, weights)
        if not self.applies(group.name, group.shape or tuple(group.anchor.shape)):
            merged = sum_of(deltas.full()) / len(weights)
        else:
            merged = self.combine(deltas).view(group.anchor.shape)
        merged = merged.to(group.anchor.dtype)
        return torch.add(group.anchor, merged, alpha=self.scale, out=merged if self.fresh else None)

    def applies(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the tensor is merged as a matrix."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude):
            return False
        return min(matrix_shape(shape)) > 1 and (len(shape) == 2 or self.convolutions)

    @abstractmethod
    def combine(self, deltas: WeightedDeltas) -> Tensor:
        """Return the merged task matrix from those of the models."""

    def scratch(self, spec: TensorSpec, models: int) -> int:
        """Return the memory of the sum of the task matrices, copies of its long factor in float64, and squares of
        the short side.
        """
        n = min(matrix_shape(spec.shape))
        return 8 * (6 * spec.numel + 4 * n * n)


class WeightedDeltas(Sequence["Tensor"]):
    """The weighted task matrices w_t (θ_t − θ₀), each computed on access, so that T of them are never in memory."""

    def __init__(self, group: Group, weights: Sequence[float]) -> None:
        self._group = group
        self._weights = [w * g for w, g in zip(weights, group.gains, strict=True)] if group.gains else weights

    def __len__(self) -> int:
        return len(self._group.models)

    def zeros(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return a zero matrix of their shape and device."""
        return torch.zeros(self.shape, dtype=dtype or self.dtype, device=self._group.anchor.device)

    def __getitem__(self, index: Any) -> Any:
        return self._delta(index).flatten(1)

    def compute(self, index: int, out: Tensor | None = None) -> Tensor:
        """Return a task matrix, in the place of another one that is no longer needed if `out` is given.

        The system takes several times as long to hand out fresh memory as a difference to fill it.
        """
        return self._delta(index, None if out is None else out.view(self._group.anchor.shape)).flatten(1)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def full(self) -> Iterator[Tensor]:
        """Yield the task matrices in their original shapes."""
        return (self._delta(index) for index in range(len(self)))

    @property
    def dtype(self) -> torch.dtype:
        return self._group.anchor.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return matrix_shape(tuple(self._group.anchor.shape))

    def _delta(self, index: int, out: Tensor | None = None) -> Tensor:
        delta = torch.sub(self._group.models[index], self._group.anchor, out=out)
        return delta if self._weights[index] == 1 else delta.mul_(self._weights[index])


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (output rows, everything else); a vector is a single row."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def sum_of(tensors: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
    """Return the sum, one at a time in float64, so that the order of the models does not matter."""
    parts = iter(tensors)
    total = next(parts).double()
    for part in parts:
        total += part
    return total


def rank_kept(n: int, models: int, fraction: float | None) -> int:
    """Return k = max(1, ⌊fraction · n⌋), where the fraction is 1/T if not given."""
    return max(1, n // models if fraction is None else int(fraction * n + 1e-9))


def side_by_side(function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Map over the threads torch may use: decompositions gain more from running in parallel than from several
    threads each. Inside the engine's workers torch has one thread, and this is a plain map.
    """
    workers = min(torch.get_num_threads(), len(items))
    if workers < 2:
        return [function(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, items))
