"""The table of quantised formats that can be read, and the search for them in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from merganser.checkpoints.codecs import awq, bitsandbytes, compressed, float4, gptq, hqq, quanto, scaled
from merganser.checkpoints.codecs.base import Codec, StoredCodes
from merganser.errors import CheckpointError


@dataclass(frozen=True)
class Format:
    """A stored format.

    Attributes:
        name: The name of the format.
        recognised: The names or settings that identify it.
        find: Yields the weights in this format, each with its codec.
    """

    name: str
    recognised: str
    find: Callable[[StoredCodes], Iterator[tuple[str, Codec]]]


FORMATS = (
    Format("4-bit bitsandbytes", "`weight.quant_state.bitsandbytes__nf4` or `__fp4`", bitsandbytes.find),
    Format("GPTQ", "`quant_method: gptq`, `qweight`, `qzeros`, `scales`", gptq.find),
    Format("AWQ", "`quant_method: awq`, `version: gemm`, `qweight`, `qzeros`, `scales`", awq.find),
    Format("packed compressed-tensors", "`weight_packed` in int32, `weight_shape`, `weight_scale`", compressed.find),
    Format("4-bit float", "`*_blocks` and `*_scales`, or bytes with `weight_scale`", float4.find),
    Format("HQQ", "`W_q` with `nbits`, `axis` and `shape`", hqq.find),
    Format("quanto", "`weight._data._data`, `weight._scale`, `weight._shift`", quanto.find),
    Format("8-bit", "float8 or int8 with a scale beside it", scaled.find),
)


def find_codecs(stored: StoredCodes) -> dict[str, tuple[Format, Codec]]:
    """Return the weights of a checkpoint that are stored as codes of a known format, by name.

    Raises:
        CheckpointError: If codes do not fit their scales, or a weight is stored twice.
    """
    found: dict[str, tuple[Format, Codec]] = {}
    taken: set[str] = set()
    for form in FORMATS:
        for name, codec in form.find(stored):
            twice = name in found or (name in stored.checkpoint and name not in codec.stored)
            if twice or not taken.isdisjoint(codec.stored):
                raise CheckpointError(
                    f"{stored.checkpoint.label}: {name!r} is stored in two formats; remove one of them"
                )
            found[name] = form, codec
            taken.update(codec.stored)
    return found
