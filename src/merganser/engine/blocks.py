"""How a tensor is cut: blocks that stay in cache are computed, spans of blocks are read and scheduled.

Both are a function of the shape alone, never of memory, workers or machine, so that partial sums over blocks are
the same everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


BLOCK = 1 << 18
SPAN = 1 << 22


@dataclass(frozen=True)
class Piece:
    """Rows `[start, stop)` of the first axis; within a single row of a tensor of three axes or more, also
    `inner` of the second axis. `offset` is the flat index of its first element, `numel` their number."""

    start: int
    stop: int
    offset: int
    numel: int
    inner: tuple[int, int] | None = None

    @property
    def rows(self) -> tuple[int, int]:
        return self.start, self.stop


def cut(shape: tuple[int, ...], size: int, rows: tuple[int, int] | None = None) -> list[Piece]:
    """Whole rows, about `size` elements a piece. Matrices keep their rows whole; larger tensors may not."""
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
    """The blocks of a tensor in runs of about `SPAN` elements, each run within consecutive rows; not to be altered."""
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
    """The rows of the first axis a run of blocks lies in."""
    return span[0].start, span[-1].stop


def take(tensor: Tensor, block: Piece, first_row: int) -> Tensor:
    """The block out of a tensor that starts at `first_row`."""
    if tensor.dim() == 0:
        return tensor
    part = tensor[block.start - first_row : block.stop - first_row]
    return part if block.inner is None else part[:, block.inner[0] : block.inner[1]]
