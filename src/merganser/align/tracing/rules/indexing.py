"""Lookups by integer indices: the axis that is looked up is pinned, the others come along."""

from __future__ import annotations

from merganser.align.tracing.calls import Call, Result, Unsupported, replaced, rule, without
from merganser.align.tracing.dims import Axes, Dim, fresh, pin


@rule("embedding")
def embedding(call: Call) -> Result:
    weight, indices = call["weight"], call["indices"]
    pin(weight[0])
    call.forbid([weight[0]], weight[1:])
    return Axes([*indices, *weight[1:]])


@rule("index_select")
def index_select(call: Call) -> Result:
    (place,) = call.dims()
    pin(call.input[place])
    call.forbid([call.input[place]], without(call.input, [place]))
    return replaced(call.input, [place], [Dim(call.shape[place], pinned=True)])


@rule("index")
def index(call: Call) -> Result:
    """x[i, :, j]: the indexed axes give way to those of the (broadcast) indices."""
    x, indices = call["self"], call["indices"]
    places = [d for d, value in enumerate(indices) if value is not None]
    looked_up = [x[d] for d in places]
    rest = without(x, places)
    pin(*looked_up, *(dim for d in places for dim in indices[d]))
    call.forbid(looked_up, rest)
    if len(places) != places[-1] - places[0] + 1 or len(call.shape) < len(rest):
        raise Unsupported
    new = len(call.shape) - len(rest)
    at = places[0]
    return Axes([*rest[:at], *fresh(call.shape[at : at + new], pinned=True), *rest[at:]])
