"""Lookups by integer indices: the axis that is looked up is pinned, the others come along."""

from __future__ import annotations

from merganser.align.tracing.calls import Call, OutputAxes, Unsupported, replaced, rule, without
from merganser.align.tracing.dims import ONE, Axes, Dim, Positions, fresh, is_pinned, pin
from merganser.align.tracing.routers import Picked, Pointers, pin_targets
from merganser.align.tracing.rules.joining import part
from merganser.align.tracing.unification import unify


@rule("embedding")
def embedding(call: Call) -> OutputAxes:
    weight, indices = call["weight"], call["indices"]
    pin(weight[0])
    call.forbid([weight[0]], weight[1:])
    return Axes([*indices, *weight[1:]])


@rule("embedding_bag")
def embedding_bag(call: Call) -> OutputAxes:
    """Sums, means or maxima of looked-up rows; the other results count indices, but for the places of the maxima."""
    weight = call["weight"]
    pin(weight[0])
    call.forbid([weight[0]], weight[1:])
    first, *counts = call.shapes
    bags = Axes([*fresh(first[:-1], pinned=True), weight[1]])
    return [bags, *(bags if shape == first else fresh(shape, pinned=True) for shape in counts)]


@rule("index_select")
def index_select(call: Call) -> OutputAxes:
    (place,) = call.dims()
    if (found := _run(call.input, place, call["index"])) is not None:
        return found
    pin(call.input[place])
    call.forbid([call.input[place]], without(call.input, [place]))
    return replaced(call.input, [place], [Dim(call.shape[place], pinned=True)])


def _run(axes: Axes, place: int, index: Axes) -> Axes | None:
    """A part of an axis, where the index is a run of fixed positions."""
    if not isinstance(index, Positions) or len(index) != 1 or (run := index.run(axes[place].size)) is None:
        return None
    return part(axes, place, run.start, len(run))


@rule("index")
def index(call: Call) -> OutputAxes:
    """x[i, :, j]: the indexed axes give way to those of the (broadcast) indices."""
    x, indices = call["self"], call["indices"]
    places = [d for d, value in enumerate(indices) if value is not None]
    if len(places) == 1 and (found := _run(x, places[0], indices[places[0]])) is not None:
        return found
    if len(places) == 1 and isinstance(indices[places[0]], Pointers) and _flat(indices[places[0]]):
        return _pick(call, x, places[0], indices[places[0]])
    pin_targets([indices[d] for d in places])
    looked_up = [x[d] for d in places]
    rest = without(x, places)
    pin(*looked_up, *(dim for d in places for dim in indices[d]))
    call.forbid(looked_up, rest)
    if len(places) != places[-1] - places[0] + 1 or len(call.shape) < len(rest):
        raise Unsupported
    new = len(call.shape) - len(rest)
    at = places[0]
    return Axes([*rest[:at], *fresh(call.shape[at : at + new], pinned=True), *rest[at:]])


def _flat(pointers: Pointers) -> bool:
    return len(pointers) == 1 and is_pinned(pointers[0])


def _pick(call: Call, x: Axes, place: int, pointers: Pointers) -> OutputAxes:
    """x[pointers]: the axis that they point to is looked up wherever its units are."""
    if isinstance(x, Picked | Pointers):
        raise Unsupported
    unify(x[place], pointers.target)
    call.forbid(without(x, [place]), [x[place]])
    return Picked.of(replaced(x, [place], [Dim(call.shape[place], pinned=True)]), pointers, place)


@rule("topk")
def topk(call: Call) -> OutputAxes:
    """The largest entries, in their order, and where they are; of entries that are equal any may be taken."""
    if not call["sorted"] or isinstance(call.input, Picked | Pointers):
        raise Unsupported
    (place,) = call.dims()
    axes, ranked = call.input, call.input[place]
    others = without(axes, [place])
    call.forbid([ranked], others)
    call.forbid(others, [ranked])
    kept = replaced(axes, [place], [Dim(call.shape[place], pinned=True) if call.shape[place] != 1 else ONE])
    return [kept, Pointers.of(kept, ranked)]
