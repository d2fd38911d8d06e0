"""HQQ: codes of 1 to 8 bits in a matrix of groups, whose rows are packed in chunks; w = (code - zero) * scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Rows
from merganser.checkpoints.codecs.base import Codec, StoredCodes
from merganser.checkpoints.codecs.packing import decode_groups, unpack_chunks
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Settings of a layer that are stored beside its codes.
_SETTINGS = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale",
    "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise",
    "optimize", "round_zero",
)  # fmt: skip


def find(stored: StoredCodes) -> Iterator[tuple[str, Codec]]:
    """Yield the weights of an HQQ checkpoint, with their codecs."""
    for stem in stored.stems("W_q"):
        settings = [f"{stem}{each}" for each in ("nbits", "shape", "axis")]
        if all(each in stored.checkpoint for each in settings):
            yield f"{stem}weight", _build_codec(stored, stem)


def _build_codec(stored: StoredCodes, stem: str) -> Codec:
    codes, scales, zeros = names = tuple(f"{stem}{end}" for end in ("W_q", "scale", "zero"))
    bits, axis = (int(stored.read_small(f"{stem}{each}").reshape(-1)[0]) for each in ("nbits", "axis"))
    shape = tuple(stored.read_small(f"{stem}shape").tolist())
    spec = stored.checkpoint.spec(codes)
    if bits not in (1, 2, 3, 4, 8) or axis not in (0, 1) or min(shape, default=0) < 1 or len(spec.shape) != 2:
        raise stored.error(codes, f"cannot have {bits} bits along axis {axis} of the shape {list(shape)}")
    if spec.element.name != ("int32" if bits == 3 else "uint8") or not all(spec.shape):
        raise stored.error(codes, f"does not have the dtype that codes of {bits} bits are packed in")
    chunk, columns = spec.shape
    matrix = math.prod(shape) // columns
    places = 8 * spec.element.itemsize // bits
    if matrix * columns != math.prod(shape) or -(-matrix // places) != chunk:
        raise stored.error(codes, f"does not contain the codes of a weight of shape {list(shape)}")
    per_group = (matrix, 1) if axis else (1, columns)
    for name in (scales, zeros):
        stored.expect(name, per_group)

    def decode(rows: Rows) -> Tensor:
        return decode_groups(shape, columns, rows, decode_rows)

    def decode_rows(start: int, stop: int) -> Tensor:
        values = unpack_chunks(stored.read(codes), bits, (start, stop), high_first=True).to(torch.float32)
        span = (start, stop) if axis else None
        return values.sub_(stored.read(zeros, span)).mul_(stored.read(scales, span).to(torch.float32))

    beside = [f"{stem}{each}" for each in _SETTINGS if f"{stem}{each}" in stored.checkpoint]
    return Codec(shape, (*names, *beside), decode)
