"""Axes laid end to end, and taken apart again."""

from __future__ import annotations

from merganser.align.tracing.calls import Call, OutputAxes, Unsupported, replaced, rule, without
from merganser.align.tracing.dims import ENUMERABLE, ONE, Axes, Dim, Sum, concat, family, find, pin, select
from merganser.align.tracing.rules.pointwise import broadcast
from merganser.align.tracing.unification import enumerate_index, narrow, split, unify


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> OutputAxes:
    tensors = [axes for axes in call["tensors"] if 0 not in axes.shape]
    (place,) = call.dims(rank=len(tensors[0]))
    for axes in tensors[1:]:
        for d, (a, b) in enumerate(zip(tensors[0], axes, strict=True)):
            if d != place:
                unify(a, b)
    return replaced(tensors[0], [place], [concat([axes[place] for axes in tensors])])


@rule("stack")
def stack(call: Call) -> OutputAxes:
    """A new axis tells the tensors apart; at each of its indices the others keep the units they had."""
    tensors = call["tensors"]
    rank = len(tensors[0]) + 1
    if len(tensors) == 1:
        index, merged = ONE, list(tensors[0])
    else:
        index = Dim(len(tensors), pinned=True)
        merged = [family(index, dims) if dims[0].size != 1 else ONE for dims in zip(*tensors, strict=True)]
    merged.insert(call.dims(rank=rank)[0], index)
    return Axes(merged)


def at_index(axes: Axes, place: int, i: int) -> list[Dim]:
    """The other axes at index i of one axis."""
    index = find(axes[place])
    others = without(axes, [place])
    if index.form is None:
        enumerate_index(index, others)
    else:
        pin(index)
    return [select(dim, index, i % index.size) for dim in others]


@rule("select")
def select_one(call: Call) -> OutputAxes:
    (place,) = call.dims()
    return Axes(at_index(call.input, place, call["index"]))


@rule("unbind")
def unbind(call: Call) -> OutputAxes:
    (place,) = call.dims()
    return [Axes(at_index(call.input, place, i)) for i in range(call.input[place].size)]


def part(axes: Axes, place: int, start: int, length: int) -> Axes:
    """A contiguous part of one axis."""
    dim = axes[place]
    if length == dim.size:
        return axes
    if length == 0:
        return replaced(axes, [place], [Dim(0, pinned=True)])
    if length == 1 and dim.size <= ENUMERABLE and not isinstance(find(dim).form, Sum):
        rest = at_index(axes, place, start)
        return Axes([*rest[:place], ONE, *rest[place:]])
    kept = narrow(dim, start, length)  # of an axis that was cut before (query heads, then one for keys), too
    if length == 1:
        pin(kept)
        kept = ONE
    return replaced(axes, [place], [kept])


@rule("slice")
def slice_(call: Call) -> OutputAxes:
    axes, (place,), step = call.input, call.dims(), call["step"]
    size = axes[place].size
    start, stop, _ = slice(call["start"], call["end"]).indices(size)
    if step == 1:
        return part(axes, place, start, max(0, stop - start))
    if start < step and size % step == 0 and call.shape[place] == size // step:
        kept, skipped = split(axes[place], (size // step, step))
        pin(skipped)
        return replaced(axes, [place], [kept])
    pin(axes[place])
    return replaced(axes, [place], [Dim(call.shape[place], pinned=True)])


@rule("narrow")
def narrow_(call: Call) -> OutputAxes:
    (place,) = call.dims()
    if not isinstance(call["start"], int):
        raise Unsupported
    return part(call.input, place, call["start"] % call.input[place].size, call["length"])


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split_(call: Call) -> OutputAxes:
    (place,) = call.dims()
    result, start = [], 0
    for shape in call.shapes:
        result.append(part(call.input, place, start, shape[place]))
        start += shape[place]
    return result


@rule("glu")
def glu(call: Call) -> OutputAxes:
    """a · σ(b) of the two halves of an axis."""
    (place,) = call.dims()
    half = call.input[place].size // 2
    return broadcast([part(call.input, place, start, half) for start in (0, half)])


@rule("pad", "constant_pad_nd")
def pad(call: Call) -> OutputAxes:
    """Constant padding adds units that are all alike; other modes mix positions."""
    axes, widths = list(call.input), call["pad"]
    constant = call.arguments.get("mode", "constant") == "constant"
    for step in range(len(widths) // 2):
        place = len(axes) - 1 - step
        before, after = widths[2 * step], widths[2 * step + 1]
        if before == after == 0:
            continue
        if constant and min(before, after) >= 0:
            padded = [Dim(n) for n in (before,) if n] + [axes[place]] + [Dim(n) for n in (after,) if n]
            axes[place] = concat(padded)
        else:
            pin(axes[place])
            axes[place] = Dim(call.shape[place], pinned=True)
    return Axes(axes)
