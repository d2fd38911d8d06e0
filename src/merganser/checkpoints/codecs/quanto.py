"""qint2 and qint4 of quanto: groups as rows, packed in chunks; w = code * scale - shift. (Bytes: `scaled`.)

The shape of the weight is not stored; it comes from the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Rows
from merganser.checkpoints.codecs.base import Codec, StoredCodes
from merganser.checkpoints.codecs.packing import decode_groups, unpack_chunks
from merganser.checkpoints.skeleton import build_skeleton
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_DATA = "._data._data"


def find(stored: StoredCodes) -> Iterator[tuple[str, Codec]]:
    """Yield the weights of 2 and 4 bits, with their codecs."""
    weights = list(stored.stems(_DATA))
    model = build_skeleton(stored.checkpoint) if weights else None
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()} if model is not None else {}
    for weight in weights:
        if weight in shapes:
            yield weight, _build_codec(stored, weight, shapes[weight])


def _build_codec(stored: StoredCodes, weight: str, shape: tuple[int, ...]) -> Codec:
    codes, scales, shifts = names = (f"{weight}{_DATA}", f"{weight}._scale", f"{weight}._shift")
    if len(stored.shape(codes)) != 2 or scales not in stored.checkpoint:
        raise stored.error(codes, "has no scales")
    chunk, columns = stored.shape(codes)
    groups = stored.shape(scales)[0]
    bits = 8 * chunk // max(1, groups)
    if bits not in (2, 4) or 8 * chunk != bits * groups or groups * columns != math.prod(shape):
        raise stored.error(codes, f"does not contain the codes of a weight of shape {list(shape)}")
    for name in (scales, shifts):
        stored.expect(name, (groups, 1))

    def decode(rows: Rows) -> Tensor:
        return decode_groups(shape, columns, rows, decode_rows)

    def decode_rows(start: int, stop: int) -> Tensor:
        values = unpack_chunks(stored.read(codes), bits, (start, stop), high_first=False).to(torch.float32)
        return values.mul_(stored.read(scales, (start, stop))).sub_(stored.read(shifts, (start, stop)))

    return Codec(shape, names, decode)
