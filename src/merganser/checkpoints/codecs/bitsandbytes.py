"""NF4 and FP4 of bitsandbytes: two codes per byte in the order of the flat weight, and a scale per block.

The scales (`absmax`) are float32, or are quantised themselves. (int8 of bitsandbytes: `scaled`.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Rows
from merganser.checkpoints.codecs.base import Codec, StoredCodes
from merganser.checkpoints.codecs.packing import decode_groups
from merganser.lazy import torch
from merganser.strict_json import parse_json

if TYPE_CHECKING:
    from torch import Tensor

_STATE = ".quant_state.bitsandbytes__"


def find(stored: StoredCodes) -> Iterator[tuple[str, Codec]]:
    """Yield the 4-bit weights with their codecs; each weight has a record of its quantisation."""
    for name in stored.checkpoint.names():
        if _STATE in name:
            weight = name.partition(_STATE)[0]
            yield weight, _build_codec(stored, weight, name)


def _build_codec(stored: StoredCodes, weight: str, state_name: str) -> Codec:
    state = _read_state(stored, state_name)
    shape, size = tuple(state["shape"]), state["blocksize"]
    absmax, table = f"{weight}.absmax", f"{weight}.quant_map"
    inner_absmax, inner_table = f"{weight}.nested_absmax", f"{weight}.nested_quant_map"
    nested = inner_absmax in stored.checkpoint
    numel = math.prod(shape)
    blocks = -(-numel // size)
    stored.expect(weight, (-(-numel // 2), 1), (1, -(-numel // 2)))
    stored.expect(absmax, (blocks,))
    stored.expect(table, (16,))
    if nested:
        inner, offset = state["nested_blocksize"], state["nested_offset"]
        stored.expect(inner_absmax, (-(-blocks // inner),))
        stored.expect(inner_table, (256,))

    def scales(first: int, last: int) -> Tensor:
        found = stored.read(absmax, (first, last))
        if not nested:
            return found.to(torch.float32)
        own = stored.read(inner_absmax)[torch.arange(first, last) // inner]
        values: Tensor = stored.read(inner_table)[found.to(torch.int64)] * own + offset
        return values

    def decode(rows: Rows) -> Tensor:
        return decode_groups(shape, size, rows, decode_blocks)

    def decode_blocks(start: int, stop: int) -> Tensor:
        raw = stored.read(weight).view(-1)[start * size // 2 : stop * size // 2]
        codes = torch.stack((raw >> 4, raw & 15), -1).view(-1)
        values = stored.read(table)[codes.to(torch.int32)]
        return values.mul_(scales(start, stop).repeat_interleave(size)[: len(values)])

    beside = (absmax, table, state_name, *((inner_absmax, inner_table) if nested else ()))
    return Codec(shape, (weight, *beside), decode)


def _read_state(stored: StoredCodes, name: str) -> Mapping[str, Any]:
    try:
        state = parse_json(bytes(stored.read_small(name).tolist()), finite=True)
        sizes = [state["blocksize"], state.get("nested_blocksize", 1), *state["shape"]]
        sane = {*map(type, sizes)} == {int} and min(sizes) > 0 and not state["blocksize"] % 2
        if sane and isinstance(state["shape"], list) and isinstance(state.get("nested_offset", 0.0), (int, float)):
            return {"nested_blocksize": 1, "nested_offset": 0.0, **state}
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise stored.error(name, "is not a record of a weight's quantisation")
