"""Reductions over whole axes, which do not care for the order of what they reduce."""

from __future__ import annotations

from merganser.align.tracing.calls import Call, OutputAxes, replaced, rule, without
from merganser.align.tracing.dims import ONE, Axes, Dim, pin
from merganser.align.tracing.rules.pointwise import broadcast


def _reduced(call: Call, dims: list[int]) -> Axes:
    call.forbid([call.input[d] for d in dims], without(call.input, dims))
    if len(call.shape) == len(call.input):
        return replaced(call.input, dims, [ONE] * len(dims))
    return Axes(without(call.input, dims))


@rule("all", "amax", "amin", "any", "count_nonzero", "frobenius_norm", "linalg_vector_norm", "logsumexp", "mean",
      "nansum", "norm", "prod", "std", "std_mean", "sum", "var", "var_mean")  # fmt: skip
def reduction(call: Call) -> OutputAxes:
    result = _reduced(call, call.dims())
    return result if len(call.shapes) == 1 else [result] * len(call.shapes)


@rule("max", "min", "argmax", "argmin", "median")
def positional_reduction(call: Call) -> OutputAxes:
    """With a `dim` these tell *where* the extremum is, which depends on the order."""
    if len(tensors := call.tensors) == 2:
        return broadcast(tensors)
    dims = call.dims()
    if "dim" in call.arguments:
        pin(*(call.input[d] for d in dims))
    result = _reduced(call, dims)
    return result if len(call.shapes) == 1 else [result] * len(call.shapes)


@rule("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax")
def softmax(call: Call) -> OutputAxes:
    dims = call.dims()
    call.forbid([call.input[d] for d in dims], without(call.input, dims))
    return call.input


@rule("cumprod", "cumsum", "flip", "roll", "sort", "tril", "triu")
def ordered(call: Call) -> OutputAxes:
    """These depend on the order along some axes; the result has its own, pinned, axes there."""
    name = "dims" if "dims" in call.arguments else "dim"
    dims = call.dims(name) if name in call.arguments else list(range(len(call.input)))[-2:]
    mixed = [call.input[d] for d in dims]
    pin(*mixed)
    call.forbid(mixed, without(call.input, dims))
    result = replaced(call.input, dims, [Dim(d.size, pinned=True) if d.size != 1 else ONE for d in mixed])
    return result if len(call.shapes) == 1 else [result] * len(call.shapes)
