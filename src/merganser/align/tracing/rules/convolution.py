"""Convolutions and other maps over pixels: channels are contracted, the order of pixels matters."""

from __future__ import annotations

from merganser.align.tracing.calls import Call, OutputAxes, rule
from merganser.align.tracing.dims import Axes, Dim, fresh, merge, pin
from merganser.align.tracing.rules.contraction import einsum
from merganser.align.tracing.unification import split, unify


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def convolution(call: Call) -> OutputAxes:
    """Channels are (group, channel in group) on both sides; a group reads only itself."""
    x, weight, bias, groups = call.input, call["weight"], call["bias"], call["groups"]
    transposed = "transpose" in call.op or bool(call.arguments.get("transposed"))
    rank = len(weight) - 2
    pin(*x[-rank:], *weight[2:])
    batch, channels = x[: -rank - 1], x[-rank - 1]
    group, inward = split(channels, (groups, channels.size // groups))
    outward: Dim
    if transposed:
        unify(channels, weight[0])
        read: Dim = inward
        outward = weight[1]
    else:
        rows, outward = split(weight[0], (groups, weight[0].size // groups))
        unify_sized(group, rows)
        read = weight[1]
    if inward.size > 1:
        call.hint(group, "group")
    operands = [[*batch, group, inward], [group, outward, read]]
    n = "n" * len(batch)
    *_, result_group, result_channel = einsum(call, operands, [n + "gi", "goi"], n + "go")
    result = merge([result_group, result_channel]) if transposed else weight[0]
    if bias is not None:
        unify_sized(result, bias[0])
    return Axes([*batch, result, *fresh(call.shape[-rank:], pinned=True)])


def unify_sized(a: Dim, b: Dim) -> None:
    if a.size != 1:
        unify(a, b)


@rule(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "upsample_bicubic2d",
    "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "max_pool2d_with_indices",
    "lp_pool2d", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
)  # fmt: skip
def pixels(call: Call) -> OutputAxes:
    """Each channel for itself; axes that change size, and all after the channels, are pinned."""
    x = call.input
    first = len(x) - _spatial_rank(call.op)
    pin(*x[first:])
    call.forbid(x[first:], x[:first])
    result = Axes([*x[:first], *fresh(call.shape[first:], pinned=True)])
    return result if len(call.shapes) == 1 else [result] * len(call.shapes)


def _spatial_rank(op: str) -> int:
    return int(next(c for c in op if c.isdigit()))
