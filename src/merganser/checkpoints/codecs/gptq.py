"""GPTQ: codes of 2, 3, 4 or 8 bits, packed along the inputs into int32, with a scale and a zero per group."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Rows
from merganser.checkpoints.codecs.base import Codec, StoredCodes
from merganser.checkpoints.codecs.packing import scale_groups, unpack_stream
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Offset between the stored value and the zero, by the name of the variant.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


def find(stored: StoredCodes) -> Iterator[tuple[str, Codec]]:
    """Yield the weights of a GPTQ checkpoint, with their codecs."""
    form = stored.settings.get("checkpoint_format") or "gptq"
    if stored.method == "gptq" and form in _ZERO_OFFSETS:
        for stem in stored.stems("qweight"):
            yield f"{stem}weight", _build_codec(stored, stem, _ZERO_OFFSETS[form])


def _build_codec(stored: StoredCodes, stem: str, offset: int) -> Codec:
    codes, zeros, scales, index = (f"{stem}{end}" for end in ("qweight", "qzeros", "scales", "g_idx"))
    words, outputs = _read_matrix_shape(stored, codes)
    groups = _read_matrix_shape(stored, scales)[0]
    bits = 32 * _read_matrix_shape(stored, zeros)[1] // max(1, outputs)
    if bits not in (2, 3, 4, 8) or words * 32 % bits or not groups:
        raise stored.error(codes, f"would have {bits} bits by the shapes of {zeros!r} and {scales!r}")
    inputs = words * 32 // bits
    stored.expect(scales, (groups, outputs))
    stored.expect(zeros, (groups, outputs * bits // 32))
    ordered = index in stored.checkpoint
    if ordered:
        stored.expect(index, (inputs,))

    @functools.cache
    def groups_of() -> Tensor | None:
        """Return the group of each input; None if groups are runs of inputs."""
        if not ordered:
            return None
        found = stored.read_groups(index, groups)
        runs = torch.arange(inputs) // -(-inputs // groups)
        return None if torch.equal(found, runs) else found

    def decode(rows: Rows) -> Tensor:
        first, last = rows
        packed = stored.read(codes)[:, first:last].t()
        zero = unpack_stream(stored.read(zeros), bits)[:, first:last].t()
        zero = (zero + offset) & ((1 << bits) - 1)
        return scale_groups(unpack_stream(packed, bits), stored.read(scales)[:, first:last].t(), zero, groups_of())

    return Codec((outputs, inputs), (codes, zeros, scales, *([index] if ordered else [])), decode)


def _read_matrix_shape(stored: StoredCodes, name: str) -> tuple[int, int]:
    spec = stored.spec(name)
    if spec is None or len(spec.shape) != 2:
        raise stored.error(name, "must be a matrix beside the codes of GPTQ and AWQ")
    return spec.shape[0], spec.shape[1]
