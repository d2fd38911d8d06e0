"""Loops that numba compiles. The first import takes some seconds for that; the result is kept in numba's cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import config, njit

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("numba is told not to compile, and these loops are no use as Python")

Array = npt.NDArray[Any]

#: So many values has a float32 without its sign and the bits that bfloat16 lacks.
_CODES = 1 << 15


@njit("uint32(uint32[::1], uint16[::1])", cache=True)
def _encode(floats: Array, codes: Array) -> Any:
    """Magnitudes as small integers in the same order, from 0 for zeros to what is returned."""
    top, low = np.uint32(0), np.uint32(_CODES)
    for bits in floats:
        code = (bits >> np.uint32(16)) & np.uint32(_CODES - 1)
        top = max(top, code)
        low = min(low, code - np.uint32(1))  # a zero wraps around
    low = min(low, top)
    for column in range(floats.size):
        code = (floats[column] >> np.uint32(16)) & np.uint32(_CODES - 1)
        codes[column] = max(code, low) - low
    return top - low


@njit("void(int16[::1], int32[::1], int32[::1], int32[::1])", cache=True)
def _survive(bits: Array, bounds: Array, gains: Array, factors: Array) -> None:
    for rank in range(bits.size):
        factors[rank] = gains[rank] & ((np.int32(bits[rank]) - bounds[rank]) >> np.int32(31))


@njit("void(uint32[::1])", cache=True)
def _sum_before(counts: Array) -> None:
    """Turn each count into the sum of those before it."""
    total = np.uint32(0)
    for place in range(counts.size):
        count = counts[place]
        counts[place] = total
        total += count


@njit("void(float32[:, ::1], int16[:, ::1], int32[::1], int32[::1], float32[:, ::1])", nogil=True, cache=True)
def drop_by_rank(rows: Array, bits: Array, bounds: Array, gains: Array, dropped: Array) -> None:
    """`drops.drop_by_rank`; `gains` as the bits of floats.

    A rank is the number of smaller magnitudes in the row, from a histogram, plus that of equal ones to the left. Two
    rows go side by side, because a counter is not ready at once for the next entry of its row.
    """
    count, columns = rows.shape
    codes = np.empty((2, columns), np.uint16)
    ranks = np.empty((2, _CODES), np.uint32)
    masks = np.empty((2, columns), np.int32)
    factors = masks.view(np.float32)
    for a in range(0, count, 2):
        b = min(a + 1, count - 1)  # of an odd number of rows the last one is its own neighbour
        a_codes, a_factors, a_row, a_dropped = codes[0], factors[0], rows[a], dropped[a]
        b_codes, b_factors, b_row, b_dropped = codes[1], factors[1], rows[b], dropped[b]
        a_ranks = ranks[0, : _encode(a_row.view(np.uint32), a_codes) + 1]
        b_ranks = ranks[1, : _encode(b_row.view(np.uint32), b_codes) + 1]
        _survive(bits[a], bounds, gains, masks[0])
        _survive(bits[b], bounds, gains, masks[1])
        a_ranks[:] = 0
        b_ranks[:] = 0
        for column in range(columns):
            a_ranks[a_codes[column]] += np.uint32(1)
            b_ranks[b_codes[column]] += np.uint32(1)
        _sum_before(a_ranks)
        _sum_before(b_ranks)
        for column in range(columns):
            a_code, b_code = a_codes[column], b_codes[column]
            a_rank, b_rank = a_ranks[a_code], b_ranks[b_code]
            a_dropped[column] = a_row[column] * a_factors[a_rank]
            b_dropped[column] = b_row[column] * b_factors[b_rank]
            a_ranks[a_code] = a_rank + np.uint32(1)
            b_ranks[b_code] = b_rank + np.uint32(1)
