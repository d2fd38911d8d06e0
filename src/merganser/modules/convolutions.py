"""Convolutions as matrices that multiply patches: y = W · patch for every patch of the input."""

from __future__ import annotations

import itertools
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_plain(part: nn.Module) -> bool:
    """Return whether a module is a convolution whose call is W · patch + b, with one W for all channels.

    Grouped convolutions have a matrix per group, transposed ones do not multiply patches, and a subclass may have its
    own forward pass.
    """
    for kind in CONVOLUTIONS:
        if isinstance(part, kind):
            own = type(part).forward is kind.forward and type(part)._conv_forward is kind._conv_forward
            return own and part.groups == 1
    return False


def axes_of(layer: Convolution) -> int:
    """Return the number of axes of the layer's input: samples × channels × positions."""
    return 2 + len(layer.kernel_size)


def count_patches(layer: Convolution, x: Tensor) -> int:
    """Return the number of patches of a sample."""
    padding = layer._reversed_padding_repeated_twice
    count = 1
    sides = zip(reversed(x.shape[2:]), padding[::2], padding[1::2], strict=True)
    for axis, (size, before, after) in enumerate(sides, start=1):
        reach = layer.dilation[-axis] * (layer.kernel_size[-axis] - 1) + 1
        count *= (size + before + after - reach) // layer.stride[-axis] + 1
    return count


def convolve(layer: Convolution, x: Tensor, rows: Tensor) -> Tensor:
    """Return `rows` · patch for every patch of the layer's input, without its bias.

    Args:
        layer: The convolution, for its window, stride, dilation and padding.
        x: The layer's input, samples × channels × positions.
        rows: A matrix with the width of the unfolded kernel, as `as_matrix` unfolds it.

    Returns:
        samples × rows × positions of the layer's output.
    """
    kernels = rows.reshape(rows.shape[0], layer.in_channels, *layer.kernel_size)
    output: Tensor = layer._conv_forward(x, kernels, None)
    return output


def pool_patches(layer: Convolution, x: Tensor, pooling: Literal["mean", "first", "last"]) -> Tensor:
    """Return the mean, the first or the last patch of every sample, samples × (channels · window).

    The mean over patches is computed separately for each position in the window, without unfolding the patches.
    """
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    places = []
    for offset in itertools.product(*map(range, layer.kernel_size)):
        seen = padded
        sides = zip(offset, layer.kernel_size, layer.dilation, layer.stride, padded.shape[2:], strict=True)
        for axis, (place, window, dilation, stride, size) in enumerate(sides, start=2):
            start, last = place * dilation, size - (window - 1 - place) * dilation
            seen = seen[(slice(None),) * axis + (slice(start, last, stride),)]
        places.append(_pool(seen.flatten(2), pooling))
    return torch.stack(places, dim=2).flatten(1)


def _pool(columns: Tensor, pooling: Literal["mean", "first", "last"]) -> Tensor:
    return columns.mean(2) if pooling == "mean" else columns[:, :, 0 if pooling == "first" else -1]
