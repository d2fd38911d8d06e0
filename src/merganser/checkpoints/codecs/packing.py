"""Unpack codes of a few bits from bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """Return the codes of a stream of bits along the last axis, the lowest bits first, as uint8.

    Integers of any width contain the same stream, since the lowest byte is stored first; codes of 3 bits cross the
    boundaries of bytes.

    Example:
        >>> unpack_stream(torch.tensor([0x21, 0x43], dtype=torch.uint8), 4)
        tensor([1, 2, 3, 4], dtype=torch.uint8)
    """
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((raw.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)
    eight = raw.reshape(*raw.shape[:-1], raw.shape[-1] // bits, bits).to(torch.int64)  # `bits` bytes hold eight codes
    whole = (eight << (8 * torch.arange(bits))).sum(-1)
    return ((whole.unsqueeze(-1) >> (bits * torch.arange(8))) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def unpack_chunks(packed: Tensor, bits: int, rows: tuple[int, int], *, high_first: bool) -> Tensor:
    """Return rows of a matrix of codes that is stored in chunks of rows, one chunk per bit field of its integers.

    Args:
        packed: The integers; as many rows as a chunk.
        bits: The number of bits per code.
        rows: The rows of the matrix to return.
        high_first: Whether the first chunk is in the highest used bits instead of the lowest.

    Example:
        >>> unpack_chunks(torch.tensor([[0x12], [0x34]], dtype=torch.uint8), 4, (1, 3), high_first=True)
        tensor([[3],
                [2]], dtype=torch.uint8)
    """
    places = 8 * packed.element_size() // bits  # for 3 bits, ten codes in 32 bits
    row = torch.arange(*rows)
    chunk, inside = row // len(packed), row % len(packed)
    shift = ((places - 1 - chunk) if high_first else chunk) * bits
    return ((packed[inside] >> shift.to(packed.dtype).unsqueeze(1)) & ((1 << bits) - 1)).to(torch.uint8)


def decode_groups(
    shape: tuple[int, ...], columns: int, rows: tuple[int, int], decode: Callable[[int, int], Tensor]
) -> Tensor:
    """Return rows of a weight whose entries, in their order, are stored as rows of a matrix of groups.

    Args:
        shape: The shape of the weight.
        columns: The entries in a row of groups.
        rows: The rows of the weight.
        decode: Returns the rows `[start, stop)` of the matrix.
    """
    width = math.prod(shape[1:])
    first, last = rows[0] * width, rows[1] * width
    start, stop = first // columns, -(-last // columns)
    values = decode(start, stop).view(-1)
    return values[first - start * columns : last - start * columns].view(-1, *shape[1:])


def scale_groups(
    codes: Tensor, scales: Tensor, zeros: Tensor | float | None = None, groups: Tensor | None = None
) -> Tensor:
    """Return (codes - zeros) * scales, where each row has a scale and a zero per group of columns.

    Args:
        codes: Rows of codes.
        scales: The scale of each group, one column per group.
        zeros: The code of zero, in the same shape; or one for all.
        groups: The group of each column; by default groups are equally long runs of columns; the last may be shorter.
    """
    values = codes.to(torch.float32)
    scales = scales.to(torch.float32)
    count, columns = scales.shape[-1], values.shape[-1]
    if groups is None and columns % count == 0:
        cut = values.view(*values.shape[:-1], count, columns // count)
        scales, zeros = scales.unsqueeze(-1), zeros.unsqueeze(-1) if isinstance(zeros, torch.Tensor) else zeros
    else:
        index = torch.arange(columns) // -(-columns // count) if groups is None else groups
        cut = values
        scales, zeros = scales[..., index], zeros[..., index] if isinstance(zeros, torch.Tensor) else zeros
    if zeros is not None:
        cut.sub_(zeros)
    cut.mul_(scales)
    return values


def exponents(raw: Tensor) -> Tensor:
    """Return 2**(code - 127) of the scales of microscaling formats (E8M0)."""
    return torch.exp2(raw.view(torch.uint8).to(torch.float32) - 127)
