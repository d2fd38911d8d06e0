"""AWQ in its GEMM form: codes of 4 bits, packed along the outputs into int32 in the order of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Rows
from merganser.checkpoints.codecs.base import Codec, StoredCodes
from merganser.checkpoints.codecs.packing import scale_groups, unpack_stream

if TYPE_CHECKING:
    from torch import Tensor

_BITS, _PLACES = 4, 8
#: The position in an integer of each of its eight outputs: outputs 0, 2, 4, 6 come before 1, 3, 5, 7.
_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def find(stored: StoredCodes) -> Iterator[tuple[str, Codec]]:
    """Yield the weights of an AWQ checkpoint, with their codecs."""
    version = str(stored.settings.get("version") or "gemm").lower()
    if stored.method == "awq" and version == "gemm" and stored.settings.get("bits", _BITS) == _BITS:
        for stem in stored.stems("qweight"):
            yield f"{stem}weight", _build_codec(stored, stem)


def _build_codec(stored: StoredCodes, stem: str) -> Codec:
    codes, zeros, scales = names = tuple(f"{stem}{end}" for end in ("qweight", "qzeros", "scales"))
    if len(stored.shape(codes)) != 2 or scales not in stored.checkpoint or not all(stored.shape(scales)):
        raise stored.error(codes, "has no scales beside it")
    inputs, words = stored.shape(codes)
    groups = stored.shape(scales)[0]
    stored.expect(scales, (groups, words * _PLACES))
    stored.expect(zeros, (groups, words))

    def outputs(name: str, rows: Rows) -> Tensor:
        """Return the codes of some outputs, a row for each."""
        first, last = rows
        start = first // _PLACES
        packed = stored.read(name)[:, start : -(-last // _PLACES)]
        found = unpack_stream(packed, _BITS).reshape(len(packed), packed.shape[1], _PLACES)[..., _ORDER].flatten(-2)
        return found[:, first - start * _PLACES : last - start * _PLACES].t()

    def decode(rows: Rows) -> Tensor:
        scale = stored.read(scales)[:, rows[0] : rows[1]].t()
        return scale_groups(outputs(codes, rows).contiguous(), scale, outputs(zeros, rows))

    return Codec((words * _PLACES, inputs), names, decode)
