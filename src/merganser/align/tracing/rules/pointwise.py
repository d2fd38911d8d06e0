"""Element by element with broadcasting: axes that meet are the same axis."""

from __future__ import annotations

from collections.abc import Sequence

from merganser.align.tracing.calls import Call, OutputAxes, rule
from merganser.align.tracing.dims import ONE, Axes, Dim, fresh
from merganser.align.tracing.unification import unify


def broadcast(tensors: Sequence[Sequence[Dim]]) -> Axes:
    """Axes aligned from the right; those longer than 1 are unified."""
    rank = max((len(axes) for axes in tensors), default=0)
    result: list[Dim] = []
    for place in range(-rank, 0):
        met = [axes[place] for axes in tensors if len(axes) >= -place and axes[place].size != 1]
        for other in met[1:]:
            unify(met[0], other)
        result.append(met[0] if met else ONE)
    return Axes(result)


@rule(
    "__and", "__or", "__xor", "_to_copy", "celu", "copy", "dropout", "elu", "feature_dropout", "fill", "hardsigmoid",
    "hardswish", "hardtanh", "leaky_relu", "masked_fill", "relu", "relu6", "selu", "where",
)  # fmt: skip
def pointwise(call: Call) -> OutputAxes:
    """Also the rule of every operator that PyTorch tags as pointwise."""
    return broadcast(call.tensors)


@rule("alias", "clone", "contiguous", "detach", "detach_copy", "lift_fresh", "lift_fresh_copy", "to", "type_as")
def same(call: Call) -> OutputAxes:
    """The same values; another tensor lends its type only."""
    return call.input


@rule("prelu")
def prelu(call: Call) -> OutputAxes:
    x, weight = call["self"], call["weight"]
    if weight and weight[0].size != 1:
        unify(x[1] if len(x) > 1 else x[0], weight[0])
    return Axes(x)


@rule("empty", "empty_like", "full", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like",
      "scalar_tensor", "zeros", "zeros_like")  # fmt: skip
def constant(call: Call) -> OutputAxes:
    """The same everywhere: no two units of these axes differ."""
    return fresh(call.shape)
