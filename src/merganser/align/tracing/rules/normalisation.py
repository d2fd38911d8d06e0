"""Normalisations: what is normalised together may be permuted together, its affine weights move along."""

from __future__ import annotations

from collections.abc import Sequence

from merganser.align.tracing.calls import Call, OutputAxes, rule, without
from merganser.align.tracing.dims import Axes, Dim, pin
from merganser.align.tracing.unification import split, unify


def _affine(axes: Sequence[Dim], call: Call, *names: str) -> None:
    for name in names:
        if (weight := call.arguments.get(name)) is not None:
            for ours, theirs in zip(axes, weight, strict=True):
                unify(ours, theirs)


@rule("layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> OutputAxes:
    x = call["input"]
    rank = len(call["normalized_shape"])
    normalised = Axes(x[len(x) - rank :])
    _affine(normalised, call, "weight", "bias")
    call.forbid(normalised, x[: len(x) - rank])
    return Axes(x)


@rule("batch_norm", "instance_norm")
def batch_norm(call: Call) -> OutputAxes:
    x = call["input"]
    _affine([x[1]], call, "weight", "bias", "running_mean", "running_var")
    if call.op == "instance_norm":
        call.forbid(x[2:], x[:2])
    return Axes(x)


@rule("group_norm")
def group_norm(call: Call) -> OutputAxes:
    """Groups may change places; channels inside a group too, each group for itself."""
    x, groups = call["input"], call["num_groups"]
    _affine([x[1]], call, "weight", "bias")
    group, channel = split(x[1], (groups, x[1].size // groups))
    call.hint(group, "group")
    call.forbid([channel, *x[2:]], [x[0], group])
    return Axes(x)


@rule("local_response_norm")
def local_response_norm(call: Call) -> OutputAxes:
    """Neighbouring channels inhibit each other: their order matters."""
    pin(call.input[1])
    call.forbid([call.input[1]], without(call.input, [1]))
    return call.input


@rule("_weight_norm")
def weight_norm(call: Call) -> OutputAxes:
    """g · v / ‖v‖ with a norm for every index of one axis (of the whole of v when that is −1)."""
    v, g, place = call["v"], call["g"], call["dim"]
    if place == -1:
        return Axes(v)
    if v[place].size != 1:
        unify(v[place], g[place])
    call.forbid(without(v, [place]), [v[place]])
    return Axes(v)
