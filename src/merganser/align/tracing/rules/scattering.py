"""Writes and reads at integer indices along one axis: that axis is pinned, the others are the same on both sides."""

from __future__ import annotations

from merganser.align.tracing.calls import Call, OutputAxes, Unsupported, replaced, rule, without
from merganser.align.tracing.dims import Axes, Dim, pin
from merganser.align.tracing.routers import Pointers, reads_picked
from merganser.align.tracing.rules.pointwise import broadcast
from merganser.align.tracing.unification import unify


@rule("index_add", "index_copy")
def index_add(call: Call) -> OutputAxes:
    """self[…, index[i], …] += source[…, i, …]"""
    x, (place,) = call["self"], call.dims()
    source = call["source"]
    if len(source) != len(x):
        raise Unsupported
    pin(x[place], source[place])
    rest = without(x, [place])
    broadcast([rest, without(source, [place])])
    call.forbid([x[place], source[place]], rest)
    return Axes(x)


@rule("index_fill")
def index_fill(call: Call) -> OutputAxes:
    """self[…, index[i], …] = value"""
    (place,) = call.dims()
    pin(call.input[place])
    call.forbid([call.input[place]], without(call.input, [place]))
    return call.input


@rule("gather", "take_along_dim")
def gather(call: Call) -> OutputAxes:
    """result[i, j] = self[index[i, j], j]: units of the other axes stay beside their indices.

    Entries at the indices of a `topk` are found wherever they are: the scores of the experts that a router picks.
    """
    x, index = call.tensors
    (place,) = call.dims()
    rest = without(x, [place])
    if [dim.size for dim in rest] != [dim.size for dim in without(index, [place])]:
        raise Unsupported
    if isinstance(index, Pointers) and reads_picked(call):
        unify(x[place], index.target)
        broadcast([rest, without(index, [place])])
        call.forbid([x[place]], rest)
        call.forbid(rest, [x[place]])
        return replaced(x, [place], [index[place]])
    pin(x[place], index[place])
    broadcast([rest, without(index, [place])])
    call.forbid([x[place], index[place]], rest)
    return replaced(x, [place], [Dim(call.shape[place], pinned=True)])


@rule("scatter_add")
def scatter_add(call: Call) -> OutputAxes:
    """self[index[i, j], j] += src[i, j]"""
    x, index, source = call.tensors
    (place,) = call.dims()
    rest = [without(axes, [place]) for axes in (x, index, source)]
    if any([dim.size for dim in axes] != [dim.size for dim in rest[0]] for axes in rest):
        raise Unsupported
    pin(x[place], index[place], source[place])
    broadcast(rest)
    call.forbid([x[place], index[place], source[place]], rest[0])
    return Axes(x)
