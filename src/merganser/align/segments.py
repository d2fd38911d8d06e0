"""Axes as segments, and segments as products of factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from merganser.kernels.linear_assignment import Index


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of an axis: moved by `atom`, or pinned if that is None."""

    atom: str | None
    size: int


@dataclass(frozen=True, slots=True)
class AxisSegment:
    """A part of an axis: index (i₁, …, i_k) of its factors lies at position `offset + Σ i_j · strides[j]`.

    Every ancestor of a nested atom is a factor too, and may stand after it (channels that were shuffled), or it is a
    factor of another axis of the tensor.
    """

    factors: tuple[Factor, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(factor.size for factor in self.factors)

    @property
    def length(self) -> int:
        return prod(self.sizes)

    @property
    def atoms(self) -> tuple[str, ...]:
        return tuple(factor.atom for factor in self.factors if factor.atom is not None)

    @property
    def contiguous(self) -> bool:
        return self.strides == contiguous_strides(self.sizes)

    @property
    def positions(self) -> Index:
        """Return positions on the axis, in the shape of the factors."""
        grid = np.full(self.sizes, self.offset, dtype=np.int64)
        for axis, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            steps = np.arange(size, dtype=np.int64) * stride
            grid += steps.reshape((size,) + (1,) * (len(self.sizes) - axis - 1))
        return grid

    @property
    def index(self) -> torch.Tensor:
        """Return positions on the axis, in the order of the factors."""
        return torch.from_numpy(self.positions.reshape(-1))


AxisSegments = tuple[AxisSegment, ...]


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))


def product(*factors: Factor, offset: int = 0) -> AxisSegments:
    """Return the axis that is one contiguous product of factors, outermost first."""
    return (AxisSegment(factors, offset, contiguous_strides([f.size for f in factors])),)


def concatenation(*axes: AxisSegments) -> AxisSegments:
    """Return the concatenation of the given axes."""
    segments: list[AxisSegment] = []
    offset = 0
    for axis in axes:
        segments += [replace(s, offset=s.offset + offset) for s in axis]
        offset += sum(s.length for s in axis)
    return tuple(segments)


def segment_from_json(data: Mapping[str, object]) -> AxisSegment:
    factors, offset, strides = data["factors"], data["offset"], data["strides"]
    if not (isinstance(factors, list) and isinstance(offset, int) and isinstance(strides, list)):
        raise ValueError(f"bad segment {data!r}")
    return AxisSegment(tuple(Factor(atom, size) for atom, size in factors), offset, tuple(strides))
