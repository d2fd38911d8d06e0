"""Magnitude cutoffs over all tensors of a model at once, as in the TIES paper."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from merganser.kernels.selection import Cutoff, largest
from merganser.methods.base import Blocks, Group, Reduction
from merganser.methods.sparsify import band, magnitudes

T = TypeVar("T")


class Chain:
    """The blocks of several tensors in sequence."""

    def __init__(self, tensors: Sequence[Blocks]) -> None:
        self.tensors = tensors
        self.starts = [0, *accumulate(len(tensor) for tensor in tensors)]

    def map(self, function: Callable[[Group], T], only: int | None = None, stride: int = 1) -> list[T]:
        if only is not None:
            tensor = bisect_right(self.starts, only) - 1
            return self.tensors[tensor].map(function, only=only - self.starts[tensor])
        return [result for tensor in self.tensors for result in tensor.map(function, stride=stride)]


def global_cutoffs(tensors: Iterable[tuple[Mapping[str, Any], Blocks]], density: Sequence[float]) -> Reduction:
    """Return a cutoff per model over all tensors together, and the offset of each tensor among all entries.

    Every model keeps ⌊density · n⌋ of all n entries; if tensors have different densities, each counts for its share.
    """
    listed = [(parameters, blocks) for parameters, blocks in tensors if len(blocks) and math.prod(blocks.shape)]
    sizes = [math.prod(blocks.shape) for _, blocks in listed]
    starts = [0, *accumulate(sizes)]
    counts = []
    for model, default in enumerate(density):
        shares = [
            _density(parameters, model, default) * size for (parameters, _), size in zip(listed, sizes, strict=True)
        ]
        counts.append([band(starts[-1], math.fsum(shares) / max(1, starts[-1]), 0.0)[1]])
    cutoffs = largest(Chain([blocks for _, blocks in listed]), magnitudes, counts, starts[-1])
    return {
        "cutoffs": [[cutoff.value, cutoff.index] for (cutoff,) in cutoffs],
        "starts": {blocks.name: start for (_, blocks), start in zip(listed, starts, strict=False)},
    }


def local_cutoffs(prepared: Reduction, name: str) -> list[list[Cutoff]]:
    """Return the cutoffs in the indices of one tensor, as `Band` needs them."""
    start = prepared["starts"].get(name, 0)
    return [[Cutoff(math.inf, 0), Cutoff(value, index - start)] for value, index in prepared["cutoffs"]]


def _density(parameters: Mapping[str, Any], model: int, default: float) -> float:
    given = parameters.get("density", default)
    return float(given[model] if isinstance(given, (list, tuple)) else given)
