"""Floats of 4 bits (E2M1), two per byte, with a scale per group of 16 or 32: MXFP4 and NVFP4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Rows
from merganser.checkpoints.codecs.base import Codec, StoredCodes
from merganser.checkpoints.codecs.packing import exponents, scale_groups, unpack_stream
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def find(stored: StoredCodes) -> Iterator[tuple[str, Codec]]:
    """Yield the weights in 4-bit floats, with their codecs."""
    for stem in stored.stems("_blocks"):
        if f"{stem}_scales" in stored.checkpoint and _is_bytes(stored, f"{stem}_blocks"):
            yield stem, _build_expert_codec(stored, stem)
    for stem in stored.stems("weight_packed"):
        if _is_bytes(stored, f"{stem}weight_packed") and f"{stem}weight_scale" in stored.checkpoint:
            yield (
                f"{stem}weight",
                _build_linear_codec(stored, stem, "weight_packed", "weight_global_scale", inverse=True),
            )
    for stem in stored.stems("weight_scale_2"):
        if _is_bytes(stored, f"{stem}weight") and f"{stem}weight_scale" in stored.checkpoint:
            yield f"{stem}weight", _build_linear_codec(stored, stem, "weight", "weight_scale_2", inverse=False)


def _is_bytes(stored: StoredCodes, name: str) -> bool:
    spec = stored.spec(name)
    return spec is not None and spec.element.name == "uint8"


def _decode_values(raw: Tensor) -> Tensor:
    table = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
    return table[unpack_stream(raw, 4).to(torch.int32)]


def _build_expert_codec(stored: StoredCodes, stem: str) -> Codec:
    """Return the codec of gpt-oss experts: blocks of 32 along the inputs, the first axis of the expert's matrix."""
    codes, scales = names = (f"{stem}_blocks", f"{stem}_scales")
    shape = stored.shape(codes)
    if len(shape) != 4 or 0 in shape:
        raise stored.error(codes, "must have an axis of experts, outputs, blocks and bytes")
    experts, outputs, blocks, size = shape
    stored.expect(scales, (experts, outputs, blocks))

    def decode(rows: Rows) -> Tensor:
        values = _decode_values(stored.read(codes, rows)).mul_(exponents(stored.read(scales, rows)).unsqueeze(-1))
        return values.flatten(2).transpose(1, 2).contiguous()

    return Codec((experts, blocks * size * 2, outputs), names, decode)


def _build_linear_codec(stored: StoredCodes, stem: str, code_end: str, whole_end: str, *, inverse: bool) -> Codec:
    """Return the codec of a matrix with scales per group of its rows and a global one, a divisor in
    compressed-tensors.
    """
    codes, scales, whole = (f"{stem}{end}" for end in (code_end, "weight_scale", whole_end))
    if len(stored.shape(codes)) != 2 or not all(stored.shape(codes)):
        raise stored.error(codes, "must be a matrix of bytes")
    outputs, width = stored.shape(codes)
    spec = stored.checkpoint.spec(scales)
    stored.expect(scales, *((outputs, 2 * width // size) for size in (16, 32) if not 2 * width % size))
    has_whole = whole in stored.checkpoint
    if has_whole:
        stored.expect(whole, (), (1,))

    def decode(rows: Rows) -> Tensor:
        raw = stored.read(scales, rows)
        scale = exponents(raw) if spec.element.name == "uint8" else raw.to(torch.float32)
        if has_whole:
            factor = stored.read(whole).to(torch.float32)
            scale = scale / factor if inverse else scale * factor
        return scale_groups(_decode_values(stored.read(codes, rows)), scale)

    return Codec((outputs, 2 * width), (codes, scales, *([whole] if has_whole else [])), decode)
