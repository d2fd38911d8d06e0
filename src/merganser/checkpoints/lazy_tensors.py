"""Tensors that are assembled from stored tensors when they are read: stacks, joins, slices, transpositions.

A fused tensor of experts is a stack of joins; one expert of it is a slice of a pick. `torch.stack`, `cat`, `chunk`,
`split`, `transpose` and `unbind` accept lazy tensors and return lazy tensors, so code that converts weights, such as
transformers', can run on names and shapes alone. `scattering` inverts an assembly.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, select_rows
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class LazyTensor:
    """A tensor of which only the shape is known until it is read."""

    shape: tuple[int, ...]

    @abstractmethod
    def read(self, rows: Rows | None = None) -> Tensor:
        """Return the tensor, or its rows `[start, stop)` along the first axis."""

    @abstractmethod
    def parts(self) -> Sequence[LazyTensor]:
        """Return the tensors it is assembled from."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> LazyTensor:
        return self

    def chunk(self, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
        return _split(self, math.ceil(self.shape[dim] / chunks), dim)

    def squeeze(self, dim: int) -> LazyTensor:
        return pick(self, dim, 0) if self.shape[dim] == 1 else self

    def transpose(self, dim0: int, dim1: int) -> LazyTensor:
        return transpose(self, dim0, dim1)

    @property
    def T(self) -> LazyTensor:
        return transpose(self, 0, 1)

    def reshape(self, *shape: Any) -> LazyTensor:
        return reshape(self, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)

    view = reshape

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = _FUNCTIONS.get(function.__name__)
        return NotImplemented if known is None else known(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class StoredTensor(LazyTensor):
    """A tensor of a checkpoint."""

    checkpoint: Checkpoint
    name: str

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.checkpoint.spec(self.name).shape

    def parts(self) -> Sequence[LazyTensor]:
        return ()

    def read(self, rows: Rows | None = None) -> Tensor:
        return self.checkpoint.read(self.name, rows)


@dataclass(frozen=True, eq=False)
class _Combination(LazyTensor):
    """Tensors along an axis."""

    tensors: tuple[LazyTensor, ...]
    axis: int

    def parts(self) -> Sequence[LazyTensor]:
        return self.tensors


class StackedTensors(_Combination):
    """Tensors of one shape along a new axis."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        inner = self.tensors[0].shape
        return (*inner[: self.axis], len(self.tensors), *inner[self.axis :])

    def read(self, rows: Rows | None = None) -> Tensor:
        if self.axis == 0:
            return torch.stack([tensor.read() for tensor in self.tensors[slice(*rows) if rows else slice(None)]])
        return torch.stack([tensor.read(rows) for tensor in self.tensors], self.axis)


class JoinedTensors(_Combination):
    """Tensors concatenated along an existing axis."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        inner = self.tensors[0].shape
        total = sum(tensor.shape[self.axis] for tensor in self.tensors)
        return (*inner[: self.axis], total, *inner[self.axis + 1 :])

    def read(self, rows: Rows | None = None) -> Tensor:
        if self.axis or rows is None:
            return torch.cat([tensor.read(rows) for tensor in self.tensors], self.axis)
        found, start = [], 0
        for tensor in self.tensors:
            first, last = max(rows[0] - start, 0), min(rows[1] - start, tensor.shape[0])
            if first < last:
                found.append(tensor.read((first, last)))
            start += tensor.shape[0]
        return torch.cat(found) if found else self.tensors[0].read((0, 0))


@dataclass(frozen=True, eq=False)
class DerivedTensor(LazyTensor):
    """A tensor made from another one."""

    source: LazyTensor

    def parts(self) -> Sequence[LazyTensor]:
        return (self.source,)


@dataclass(frozen=True, eq=False)
class SlicedTensor(DerivedTensor):
    """The part `[start, stop)` of a tensor along an axis."""

    axis: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        inner = self.source.shape
        return (*inner[: self.axis], self.stop - self.start, *inner[self.axis + 1 :])

    def read(self, rows: Rows | None = None) -> Tensor:
        if self.axis:
            return self.source.read(rows).narrow(self.axis, self.start, self.stop - self.start)
        first, last = rows if rows is not None else (0, self.stop - self.start)
        return self.source.read((self.start + first, self.start + last))


@dataclass(frozen=True, eq=False)
class PickedTensor(DerivedTensor):
    """One index of a tensor along an axis, which is removed."""

    axis: int
    index: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*self.source.shape[: self.axis], *self.source.shape[self.axis + 1 :])

    def read(self, rows: Rows | None = None) -> Tensor:
        if self.axis:
            return self.source.read(rows).select(self.axis, self.index)
        return select_rows(self.source.read((self.index, self.index + 1))[0], rows)


@dataclass(frozen=True, eq=False)
class TransposedTensor(DerivedTensor):
    """A tensor with two of its axes exchanged."""

    axes: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        shape = list(self.source.shape)
        one, other = self.axes
        shape[one], shape[other] = shape[other], shape[one]
        return tuple(shape)

    def read(self, rows: Rows | None = None) -> Tensor:
        if 0 not in self.axes:
            return self.source.read(rows).transpose(*self.axes)
        return select_rows(self.source.read().transpose(*self.axes), rows)


@dataclass(frozen=True, eq=False)
class ReshapedTensor(DerivedTensor):
    """A tensor in another shape with the same number of entries."""

    shape: tuple[int, ...]

    def read(self, rows: Rows | None = None) -> Tensor:
        return select_rows(self.source.read().reshape(self.shape), rows)


def find_stored_names(tensor: LazyTensor) -> set[str]:
    """Return the names of the stored tensors that a lazy tensor is assembled from."""
    if isinstance(tensor, StoredTensor):
        return {tensor.name}
    return {name for part in tensor.parts() for name in find_stored_names(part)}


def stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Stack tensors of one shape along a new axis.

    Raises:
        ValueError: If the shapes differ.
    """
    if len({tensor.shape for tensor in tensors}) != 1:
        raise ValueError(f"stacked tensors differ in shape: {sorted({tensor.shape for tensor in tensors})}")
    first = tensors[0]
    if isinstance(first, PickedTensor) and first.axis == dim and first.source.shape[dim] == len(tensors):
        places = [(t.source, t.axis, t.index) for t in tensors if isinstance(t, PickedTensor)]
        if places == [(first.source, dim, index) for index in range(len(tensors))]:
            return first.source
    return StackedTensors(tuple(tensors), dim % (first.ndim + 1))


def join(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Concatenate tensors along an axis; slices that complete a tensor become that tensor again.

    Raises:
        ValueError: If the shapes differ along other axes.
    """
    first = tensors[0]
    axis = dim % first.ndim
    if len({(*t.shape[:axis], *t.shape[axis + 1 :]) for t in tensors}) != 1:
        raise ValueError(f"joined tensors differ in shape: {sorted({tensor.shape for tensor in tensors})}")
    if len(tensors) == 1:
        return first
    if isinstance(first, SlicedTensor):
        stops = [0]
        for tensor in tensors:
            fits = isinstance(tensor, SlicedTensor) and tensor.source is first.source and tensor.axis == axis
            if not fits or not isinstance(tensor, SlicedTensor) or tensor.start != stops[-1]:
                break
            stops.append(tensor.stop)
        if len(stops) == len(tensors) + 1 and stops[-1] == first.source.shape[axis]:
            return first.source
    return JoinedTensors(tuple(tensors), axis)


def cut(tensor: LazyTensor, dim: int, start: int, stop: int) -> LazyTensor:
    """Return the part `[start, stop)` along an axis; for a join, the joined tensors."""
    if (start, stop) == (0, tensor.shape[dim]):
        return tensor
    if isinstance(tensor, JoinedTensors) and tensor.axis == dim:
        place = 0
        for part in tensor.tensors:
            if (place, place + part.shape[dim]) == (start, stop):
                return part
            place += part.shape[dim]
    return SlicedTensor(tensor, dim, start, stop)


def pick(tensor: LazyTensor, dim: int, index: int) -> LazyTensor:
    """Return one index along an axis; for a stack, the stacked tensor."""
    if isinstance(tensor, StackedTensors) and tensor.axis == dim:
        return tensor.tensors[index]
    if isinstance(tensor, JoinedTensors) and tensor.axis > dim:
        return join([pick(part, dim, index) for part in tensor.tensors], tensor.axis - 1)
    return PickedTensor(tensor, dim, index)


def transpose(input: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    """Return a tensor with two of its axes exchanged."""
    axes = (dim0 % input.ndim, dim1 % input.ndim)
    if isinstance(input, TransposedTensor) and set(input.axes) == set(axes):
        return input.source
    return TransposedTensor(input, axes)


def reshape(tensor: LazyTensor, shape: Iterable[int]) -> LazyTensor:
    wanted = tuple(torch.empty(tensor.shape, device="meta").reshape(tuple(shape)).shape)
    inner = tensor.source if isinstance(tensor, ReshapedTensor) else tensor
    return inner if inner.shape == wanted else ReshapedTensor(inner, wanted)


def _split(tensor: LazyTensor, size: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    total, axis = tensor.shape[dim], dim % tensor.ndim
    sizes = [min(size, total - start) for start in range(0, total, size)] if isinstance(size, int) else list(size)
    stops = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return tuple(cut(tensor, axis, stop - size, stop) for size, stop in zip(sizes, stops, strict=True))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "stack": stack,
    "cat": join,
    "chunk": LazyTensor.chunk,
    "split": _split,
    "transpose": transpose,
    "unbind": lambda tensor, dim=0: tuple(pick(tensor, dim, index) for index in range(tensor.shape[dim])),
}
