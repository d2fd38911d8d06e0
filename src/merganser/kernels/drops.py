"""Random drops: an entry survives if 16 random bits, a signed integer, are below a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.kernels.arrays import AnyArray
from merganser.kernels.recording import Draws, Lane
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor


#: The bits of a float32 that determine magnitudes.
_MAGNITUDE = 0x7FFF0000


def drop_(values: Tensor, bits: Tensor, bound: int) -> Tensor:
    """Zero the entries that do not survive, in place."""
    if isinstance(values, Lane):
        assert isinstance(bits, Draws)
        return values.become(values.note("DROP", place=bits.model, low=bound))
    _bits(values).bitwise_and_(_survivors(bits, bound))
    return values


def drop_by_rank(rows: Tensor, bits: Tensor, bounds: AnyArray, gains: AnyArray) -> Tensor:
    """Multiply entries of rank k in their row by gains[k] if bits[k] of the row is below bounds[k]; zero the others.

    Ranks are by magnitude, from 0 for the smallest; see `order`.
    """
    if isinstance(rows, Lane):
        assert isinstance(bits, Draws)
        rows.recording.tile = len(bounds)
        return rows.note("DROP_BY_RANK", place=bits.model, tables=(bounds, gains))
    bound, gain = (torch.from_numpy(table).to(rows.device) for table in (bounds, gains))
    factors = (_survivors(bits, bound) & _bits(gain)).view(rows.dtype)
    return torch.empty_like(rows).scatter_(1, order(rows), factors).mul_(rows)


def order(rows: Tensor) -> Tensor:
    """Return the columns of each row from its smallest magnitude to its largest (an argsort).

    Magnitudes count as equal if they agree in the bits that bfloat16 keeps; equal ones keep their order. On the CPU
    this sorts integers that combine magnitude and column, many times faster than an argsort.
    """
    if rows.device.type != "cpu":
        return (rows.float().view(torch.int32) & _MAGNITUDE).sort(dim=-1, stable=True).indices
    columns = np.arange(rows.shape[-1], dtype=np.uint32)
    keys: AnyArray = rows.float().numpy().view(np.uint32) & np.uint32(_MAGNITUDE)
    if columns.size > 1 << 16:
        keys = keys.astype(np.uint64) << np.uint64(16)
    keys |= columns
    keys.sort(axis=-1)
    keys &= keys.dtype.type((1 << 4 * keys.itemsize) - 1)
    return torch.from_numpy(keys.astype(np.int64))


def _survivors(bits: Tensor, bound: int | Tensor) -> Tensor:
    """Return all bits set where bits < bound and none elsewhere: (bits − bound) >> 31 of 16-bit integers.

    A mask for the bits of floats, many times faster than boolean masks.
    """
    return bits.to(torch.int32).sub_(bound).bitwise_right_shift_(31)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int64 if values.dtype == torch.float64 else torch.int32)
