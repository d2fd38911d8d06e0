"""Tensors read at indices that were computed: the experts that a router picks.

`topk` over an axis of experts returns indices that *point* to that axis: when experts are permuted, so are the indices.
A tensor read at them from weights with an axis of experts has no such axis itself, but every sample still has its
expert: units may have a separate order for each expert as long as samples are kept apart. The rules are conservative:
an operation that is not listed pins the experts, or removes their orders from the units.
"""

from __future__ import annotations

from collections.abc import Sequence

from merganser.align.tracing.calls import Call, OutputAxes
from merganser.align.tracing.dims import Axes, Dim, pin

_SAME = {"alias", "clone", "contiguous", "detach"}
_VIEWS = {"flatten", "permute", "reshape", "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view"}
_POINTWISE = {"add", "clamp", "div", "gelu", "mul", "relu", "sigmoid", "silu", "sub", "tanh"} | _SAME
_CUTTING = {"chunk", "narrow", "slice", "split", "split_with_sizes"}


class Pointers(Axes):
    """The axes of an integer tensor whose values are positions on the axis `target`."""

    target: Dim

    @classmethod
    def of(cls, axes: Axes, target: Dim) -> Pointers:
        found = cls(axes)
        found.target = target
        return found


class Picked(Axes):
    """The axes of a tensor whose entries at position s of axis `sample` belong to index `pointers[s]` of its target."""

    pointers: Pointers
    sample: int

    @classmethod
    def of(cls, axes: Axes, pointers: Pointers, sample: int) -> Picked:
        found = cls(axes)
        found.pointers, found.sample = pointers, sample
        return found


def at_hand(axes: Axes) -> Axes:
    """Return the axes of a tensor, and the axis whose index is known for each of its samples."""
    return Axes([*axes, axes.pointers.target]) if isinstance(axes, Picked) else axes


def pin_targets(tensors: Sequence[Axes]) -> None:
    """Pin the targets of indices: their values matter."""
    pin(*(axes.target for axes in tensors if isinstance(axes, Pointers)))


def reads_picked(call: Call) -> bool:
    """Return whether an operation reads plain entries at indices that point to them."""
    if call.op not in ("gather", "take_along_dim"):
        return False
    x, index = call.tensors
    return isinstance(index, Pointers) and not isinstance(x, Pointers | Picked)


def follow(call: Call, result: OutputAxes, *, in_place: bool) -> OutputAxes:
    """Return the result of an operation on plain axes, with what is still known about indices and samples."""
    if call.op == "topk" or (call.op == "index" and isinstance(result, Picked)) or reads_picked(call):
        return result  # their rules refuse such operands, or know them
    pointers = [axes for axes in call.tensors if isinstance(axes, Pointers)]
    if pointers and not in_place and call.op in _SAME | _VIEWS and isinstance(result, Axes):
        return Pointers.of(Axes(result), pointers[0].target)
    pin_targets(pointers)
    picked = [axes for axes in call.tensors if isinstance(axes, Picked)]
    if not picked:
        return _plain(result)
    sample = _sample(call, picked)
    if sample is None:
        call.forbid([axes.pointers.target for axes in picked], [dim for axes in call.tensors for dim in axes])
        return _plain(result)
    results = [result] if isinstance(result, Axes) else result
    kept = [Picked.of(Axes(axes), picked[0].pointers, len(axes) - sample) for axes in results]
    return kept[0] if isinstance(result, Axes) else list(kept)


def _plain(result: OutputAxes) -> OutputAxes:
    def plain(axes: Axes) -> Axes:
        return Axes(axes) if isinstance(axes, Pointers | Picked) else axes

    return plain(result) if isinstance(result, Axes) else [plain(axes) for axes in result]


def _sample(call: Call, picked: Sequence[Picked]) -> int | None:
    """Return the axis of samples in the results, counted from the last axis, if the operation keeps them apart."""
    places = {len(axes) - axes.sample for axes in picked}
    if len(places) != 1 or any(axes.pointers is not picked[0].pointers for axes in picked):
        return None
    (place,) = places
    rank = len(picked[0])
    if call.op in _POINTWISE:
        return place
    if call.op == "bmm":
        return place if place == 3 else None
    if call.op in _CUTTING:
        return place if call.dims(rank=rank) != [rank - place] else None
    if call.op == "transpose":
        swapped = {call["dim0"] % rank, call["dim1"] % rank}
        return place if rank - place not in swapped else None
    if call.op == "unsqueeze":
        return place + int(call["dim"] % (rank + 1) > rank - place)
    if call.op == "squeeze" and isinstance(call.arguments.get("dim"), int):
        dim = call["dim"] % rank
        if picked[0][dim].size != 1:
            return place
        return place - (dim > rank - place) if dim != rank - place else None
    return None
