"""`pack-quantized` of compressed-tensors: integers of 4 or 8 bits in int32, with scales per channel or group.

(`float-quantized`, `int-quantized` and `naive-quantized`: see `scaled`; NVFP4 and MXFP4: `float4`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Rows
from merganser.checkpoints.codecs.base import Codec, StoredCodes
from merganser.checkpoints.codecs.packing import scale_groups, unpack_stream

if TYPE_CHECKING:
    from torch import Tensor


def find(stored: StoredCodes) -> Iterator[tuple[str, Codec]]:
    """Yield the weights that are packed into int32, with their codecs."""
    for stem in stored.stems("weight_packed"):
        spec = stored.checkpoint.spec(f"{stem}weight_packed")
        needed = (f"{stem}weight_shape", f"{stem}weight_scale")
        if spec.element.name == "int32" and all(name in stored.checkpoint for name in needed):
            yield f"{stem}weight", _build_codec(stored, stem)


def _build_codec(stored: StoredCodes, stem: str) -> Codec:
    ends = ("packed", "scale", "shape", "zero_point", "g_idx")
    codes, scales, size, zeros, index = (f"{stem}weight_{end}" for end in ends)
    stored.expect(size, (2,))
    outputs, inputs = stored.read_small(size).tolist()
    words = stored.shape(codes)[-1]
    bits = next((each for each in (4, 8) if -(-inputs * each // 32) == words), 0)
    if not bits or min(outputs, inputs) < 1:
        raise stored.error(codes, f"does not contain the codes of a weight of shape {[outputs, inputs]}")
    stored.expect(codes, (outputs, words))
    groups = stored.shape(scales)[-1] if stored.shape(scales) else 0
    if not 0 < groups <= inputs:
        raise stored.error(scales, "does not have a scale per group")
    stored.expect(scales, (outputs, groups))
    uneven, ordered = zeros in stored.checkpoint, index in stored.checkpoint
    if uneven:
        stored.expect(zeros, (-(-outputs * bits // 32), groups))
    if ordered:
        stored.expect(index, (inputs,))

    def decode(rows: Rows) -> Tensor:
        unpacked = unpack_stream(stored.read(codes, rows), bits)[:, :inputs]
        zero: Tensor | float = float(1 << (bits - 1))
        if uneven:
            zero = unpack_stream(stored.read(zeros).t(), bits)[:, rows[0] : rows[1]].t()
        return scale_groups(
            unpacked, stored.read(scales, rows), zero, stored.read_groups(index, groups) if ordered else None
        )

    beside = [name for name, there in ((zeros, uneven), (index, ordered)) if there]
    return Codec((outputs, inputs), (codes, scales, size, *beside), decode)
