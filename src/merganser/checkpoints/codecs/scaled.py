"""One code per byte (float8, int8) times a scale per tensor, row or block.

Covers the FP8 of DeepSeek, compressed-tensors, FBGEMM, ModelOpt and ComfyUI, the int8 of compressed-tensors and
bitsandbytes, and the byte-wide kinds of quanto and torchao: w = (code - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Rows
from merganser.checkpoints.codecs.base import Codec, StoredCodes
from merganser.checkpoints.codecs.packing import exponents
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_EXPONENTS = ("uint8", "float8_e8m0fnu")
#: Suffixes of codes, scales and the weight, and the divisor of the scales.
_SCHEMES = (
    ("", "_scale_inv", "", 1),
    ("", "_scale", "", 1),
    ("weight", "scale_weight", "weight", 1),
    ("weight", "qscale_weight", "weight", 1),
    ("weight", "scale", "weight", 1),
    ("weight", "SCB", "weight", 127),
    ("weight._data", "weight._scale", "weight", 1),
    ("_weight_qdata", "_weight_scale", "weight", 1),
)


def find(stored: StoredCodes) -> Iterator[tuple[str, Codec]]:
    """Yield the weights with codes of one byte, with their codecs."""
    for name in stored.checkpoint.names():
        spec = stored.checkpoint.spec(name)
        if spec.element.name not in (*_FLOAT8, "int8") or not spec.shape:
            continue
        for end, scale_end, target, divisor in _SCHEMES:
            stem = name[: len(name) - len(end)]
            scale = stored.spec(stem + scale_end) if name.endswith(end) else None
            if scale and (scale.element.is_floating_point or scale.element.name in _EXPONENTS):
                yield stem + target, _build_codec(stored, name, stem + scale_end, divisor)
                break


def _build_codec(stored: StoredCodes, name: str, scale_name: str, divisor: int) -> Codec:
    shape = stored.shape(name)
    grid, blocks = _lay_out(stored, scale_name, shape)
    zero_name = f"{scale_name.removesuffix('_scale')}_zero_point"
    zero_name = zero_name if scale_name.endswith("_scale") and zero_name in stored.checkpoint else ""
    if zero_name:
        stored.expect(zero_name, stored.shape(scale_name), grid)

    def decode(rows: Rows) -> Tensor:
        values = stored.read(name, rows).to(torch.float32)
        if zero_name:
            _apply(values, stored.read(zero_name).view(grid).to(torch.float32), blocks, rows, torch.Tensor.sub_)
        scale = stored.read(scale_name).view(grid)
        wide = exponents(scale) if stored.checkpoint.spec(scale_name).element.name in _EXPONENTS else scale.float()
        return _apply(values, wide / divisor, blocks, rows, torch.Tensor.mul_)

    return Codec(shape, tuple(filter(None, (name, scale_name, zero_name))), decode)


def _lay_out(stored: StoredCodes, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of scales with as many axes as the weight, and how many entries share one along each axis."""
    given = stored.shape(name)
    grid = (1,) * len(shape) if all(n == 1 for n in given) else (*given, *(1,) * (len(shape) - len(given)))
    said = stored.settings.get("weight_block_size")
    sizes: Sequence[object] = said if isinstance(said, list) and len(said) == 2 else (None, None)
    wanted = (*(None,) * (len(shape) - 2), *sizes)[-len(shape) :]
    if len(grid) == len(shape) and 0 not in grid and 0 not in shape:
        blocks = [_count_sharing(size, count, each) for size, count, each in zip(shape, grid, wanted, strict=True)]
        if all(blocks):
            return grid, tuple(blocks)
    raise stored.error(name, f"does not have a scale for each part of a weight of shape {list(shape)}")


def _count_sharing(size: int, count: int, wanted: object) -> int:
    """Return how many of `size` entries share one of `count` scales; 0 if that is impossible."""
    if isinstance(wanted, int) and wanted > 0 and -(-size // wanted) == count:
        return wanted
    return 0 if size % count else size // count


def _apply(
    values: Tensor, factor: Tensor, blocks: tuple[int, ...], rows: Rows, operation: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Apply an operation in place to rows of a weight and the matching part of a grid."""
    if len(factor) > 1:
        factor = factor[torch.arange(*rows) // blocks[0]]
    for axis in range(1, values.dim()):
        if factor.shape[axis] > 1 and blocks[axis] > 1:
            factor = factor.repeat_interleave(blocks[axis], axis).narrow(axis, 0, values.shape[axis])
    return operation(values, factor)
