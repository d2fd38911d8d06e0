"""Views: axes split, merge, change places, repeat."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from merganser.align.tracing.calls import Call, OutputAxes, Unsupported, rule
from merganser.align.tracing.dims import ONE, Axes, Dim, merge, pin
from merganser.align.tracing.unification import split


def regroup(axes: Sequence[Dim], shape: Sequence[int]) -> Axes:
    """Row-major reshape: the shortest runs of old and new axes with equal products are merged and split."""
    old = [dim for dim in axes if dim.size != 1]
    new = [size for size in shape if size != 1]
    found: list[Dim] = []
    while old or new:
        taken, sizes = [old.pop(0)], [new.pop(0)]
        while (a := prod(dim.size for dim in taken)) != (b := prod(sizes)):
            if a < b:
                taken.append(old.pop(0))
            else:
                sizes.append(new.pop(0))
        found += split(merge(taken), sizes)
    result = iter(found)
    return Axes(next(result) if size != 1 else ONE for size in shape)


@rule("_reshape_alias", "_unsafe_view", "flatten", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view",
      "view_as")  # fmt: skip
def reshape(call: Call) -> OutputAxes:
    if 0 in call.shape or "dtype" in call.arguments:
        raise Unsupported
    return regroup(call.input, call.shape)


@rule("view_as_complex")
def view_as_complex(call: Call) -> OutputAxes:
    """Pairs along the last axis become numbers: the two of a pair stay where they are."""
    *rest, pair = call.input
    pin(pair)
    call.forbid([pair], rest)
    return Axes(rest)


@rule("view_as_real")
def view_as_real(call: Call) -> OutputAxes:
    return Axes([*call.input, Dim(2, pinned=True)])


@rule("permute")
def permute(call: Call) -> OutputAxes:
    return Axes(call.input[d] for d in call.dims("dims"))


@rule("transpose", "swapaxes", "swapdims")
def transpose(call: Call) -> OutputAxes:
    axes = list(call.input)
    a, b = (value for value in call.arguments.values() if isinstance(value, int))
    axes[a], axes[b] = axes[b], axes[a]
    return Axes(axes)


@rule("t", "numpy_T", "adjoint", "mT", "mH")
def turn(call: Call) -> OutputAxes:
    axes = list(call.input)
    if call.op in ("t", "numpy_T"):
        return Axes(axes[::-1])
    return Axes([*axes[:-2], axes[-1], axes[-2]])


@rule("movedim", "moveaxis")
def movedim(call: Call) -> OutputAxes:
    source, target = call.dims("source"), call.dims("destination")
    rest = iter(d for d in range(len(call.input)) if d not in source)
    back = dict(zip(target, source, strict=True))
    return Axes(call.input[back[d] if d in back else next(rest)] for d in range(len(call.input)))


@rule("expand", "expand_as", "broadcast_to")
def expand(call: Call) -> OutputAxes:
    """A stretched axis is new, and constant along itself."""
    axes, shape = call.input, call.shape
    aligned = [ONE] * (len(shape) - len(axes)) + list(axes)
    return Axes(Dim(n) if dim.size == 1 and n != 1 else dim for dim, n in zip(aligned, shape, strict=True))


@rule("repeat", "tile")
def repeat(call: Call) -> OutputAxes:
    """n copies one after another: (copy, unit)."""
    axes, shape = call.input, call.shape
    aligned = [ONE] * (len(shape) - len(axes)) + list(axes)
    return Axes(
        merge([Dim(n // dim.size), dim]) if n != dim.size else dim for dim, n in zip(aligned, shape, strict=True)
    )


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> OutputAxes:
    """Every unit n times in a row: (unit, copy)."""
    if not isinstance(call.arguments.get("repeats"), int) or call.arguments.get("dim") is None:
        raise Unsupported
    axes, (place,), n = list(call.input), call.dims(), call["repeats"]
    axes[place] = merge([axes[place], Dim(n)]) if n != 1 else axes[place]
    return Axes(axes)


@rule("pixel_shuffle")
def pixel_shuffle(call: Call) -> OutputAxes:
    *batch, channels, height, width = call.input
    r = call["upscale_factor"]
    channels, down, right = split(channels, (channels.size // r**2, r, r))
    return Axes([*batch, channels, merge([height, down]), merge([width, right])])


@rule("pixel_unshuffle")
def pixel_unshuffle(call: Call) -> OutputAxes:
    *batch, channels, height, width = call.input
    r = call["downscale_factor"]
    height, down = split(height, (height.size // r, r))
    width, right = split(width, (width.size // r, r))
    return Axes([*batch, merge([channels, down, right]), height, width])


@rule("channel_shuffle")
def channel_shuffle(call: Call) -> OutputAxes:
    axes = list(call.input)
    groups, inner = split(axes[1], (call["groups"], axes[1].size // call["groups"]))
    axes[1] = merge([inner, groups])
    return Axes(axes)
