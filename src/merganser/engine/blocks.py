"""Split tensors into blocks that fit in cache (the unit of computing) and spans of blocks (the unit of reading).

Both depend on the shape alone, never on memory, workers or machine, so that partial sums over blocks are the same
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from merganser.checkpoints.stored_entries import StoredEntries


BLOCK = 1 << 18
SPAN = 1 << 22


@dataclass(frozen=True)
class Piece:
    """Rows `[start, stop)` of the first axis. Inside a single row of a tensor with three or more axes, `inner` is a
    range of the second axis. `offset` is the flat index of the first element, `numel` the number of elements.
    """

    start: int
    stop: int
    offset: int
    numel: int
    inner: tuple[int, int] | None = None

    @property
    def rows(self) -> tuple[int, int]:
        return self.start, self.stop


def cut(shape: tuple[int, ...], size: int, rows: tuple[int, int] | None = None) -> list[Piece]:
    """Split a tensor into pieces of about `size` elements. Matrices are split between rows, larger tensors anywhere."""
    if not shape:
        return [Piece(0, 1, 0, 1)]
    first, last = rows or (0, shape[0])
    row = math.prod(shape[1:])
    if row == 0:
        return [Piece(first, last, 0, 0)]
    if row > size and len(shape) > 2 and first < last:
        width = math.prod(shape[2:])
        step = max(1, size // max(1, width))
        inner = [(a, min(a + step, shape[1])) for a in range(0, shape[1], step)]
        return [
            Piece(r, r + 1, r * row + a * width, (b - a) * width, (a, b)) for r in range(first, last) for a, b in inner
        ]
    step = max(1, size // row)
    starts = range(first, last, step) or (first,)
    return [Piece(r, min(r + step, last), r * row, (min(r + step, last) - r) * row) for r in starts]


@lru_cache(maxsize=64)
def spans(shape: tuple[int, ...]) -> list[list[Piece]]:
    """Return the blocks of a tensor in runs of about `SPAN` elements in consecutive rows. Do not modify the list."""
    runs: list[list[Piece]] = []
    held = 0
    for block in cut(shape, BLOCK):
        if not runs or held + block.numel > SPAN:
            runs.append([])
            held = 0
        runs[-1].append(block)
        held += block.numel
    return runs


def bounds(span: list[Piece]) -> tuple[int, int]:
    """Return the range of rows of the first axis that a run of blocks covers."""
    return span[0].start, span[-1].stop


def join(span: list[Piece]) -> Piece:
    """Return a run of blocks as one piece."""
    return Piece(*bounds(span), span[0].offset, sum(block.numel for block in span))


def cut_entries(
    rows: StoredEntries, span: list[Piece], shape: tuple[int, ...]
) -> Iterator[tuple[Piece, StoredEntries]]:
    """Yield the blocks of a span from the entries of its rows."""
    origin = span[0].start * math.prod(shape[1:])
    for block in span:
        yield block, rows[block.offset - origin : block.offset - origin + block.numel]


def take(tensor: Tensor, block: Piece, first_row: int) -> Tensor:
    """Return the block of a tensor that starts at `first_row`."""
    if tensor.dim() == 0:
        return tensor
    part = tensor[block.start - first_row : block.stop - first_row]
    return part if block.inner is None else part[:, block.inner[0] : block.inner[1]]
