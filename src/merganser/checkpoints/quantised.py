"""Detect weights that are stored as codes with scales.

| scheme | the codes | what stands beside them |
|---|---|---|
| FP8 (DeepSeek, compressed-tensors) | `weight` in float8 | `weight_scale_inv`, `weight_scale`, `scale_weight` |
| MXFP4 (gpt-oss) | `gate_up_proj_blocks`, uint8 | `gate_up_proj_scales` |
| bitsandbytes | `weight`, int8 or packed uint8 | `SCB`; `weight.absmax`, `weight.quant_map` |
| GPTQ, AWQ, packed compressed-tensors | `qweight`, `weight_packed`, int32 | `scales`, `qzeros`; `weight_scale` |
| quanto | `weight._data`, int8 or packed uint8 | `weight._scale`, `weight._shift` |
| HQQ, VPTQ, AQLM and what comes next | `W_q`, `indices`, `codes`: any integers | whatever else its module has |

Unknown schemes are detected by the config: if it has a `quantization_config`, integers are codes unless they are named
like positions or counters. Float8 tensors without scales, in a model whose config does not mention quantisation, are
ordinary weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from merganser.checkpoints.base import Checkpoint, TensorSpec, is_integer
from merganser.checkpoints.json_file import read_config
from merganser.errors import CheckpointError

#: Dtypes that codes are packed into; masks are bool, and indices int64.
_INTEGERS = ("int8", "uint8", "int16", "int32")
_PACKED = re.compile(r"(_(packed|blocks|qdata)|\._data)$")
#: Integers of ordinary models: positions, token types, counters, indices.
_COUNTED = re.compile(r"(_ids|num_batches_tracked|relative_position_index|coords_table|\.bias|mask)$")
#: Suffixes of a tensor's name, and names beside it in its module, that mark scales of its codes.
_AFTER = ("_scale", "_scale_inv", "_scales", ".absmax", "._scale")
_BESIDE = ("scales", "SCB", "scale_weight")
_COMPANION = re.compile(r"(^|[._])(scales?|scale_inv|scale_weight|SCB|absmax|quant_map|zero_point|qzeros|g_idx)$")


def find_codes(checkpoint: Checkpoint, config: Mapping[str, Any]) -> frozenset[str]:
    """Return the tensors of a checkpoint that are codes or belong to codes, to be copied together or not at all."""
    configured = "quantization_config" in config
    specs = {name: checkpoint.spec(name) for name in checkpoint.names()}
    codes = {name for name, spec in specs.items() if _is_code(name, spec, checkpoint, configured)}
    unknown = {name for name, spec in specs.items() if configured and _is_unknown_code(name, spec)} - codes
    if not codes and not unknown:
        return frozenset()
    owners = codes | {name.rpartition(".")[0] for name in codes}
    modules = {name.rpartition(".")[0] for name in unknown} - {""}
    beside = {
        name
        for name in specs
        if (is_scale(name) and name.rpartition(".")[0] in owners) or not modules.isdisjoint(_find_owners(name))
    }
    return frozenset(codes | unknown | beside)


def refuse_quantised(checkpoint: Checkpoint, exclude: Sequence[str] = ()) -> None:
    """Refuse a checkpoint with codes that `exclude` does not remove: codes have no differences, so no task vector."""
    used = [name for name in codes_of(checkpoint) if not any(fnmatchcase(name, glob) for glob in exclude)]
    if used:
        name = min(used, key=lambda name: (is_scale(name), name))
        raise CheckpointError(
            f"{checkpoint.label}: {name!r} is {checkpoint.spec(name)}, one of {len(used)} tensors of codes and scales: "
            "a quantised weight has no difference from another; dequantise the model first, or exclude all of them"
        )


def note_quantised(label: str, forms: Mapping[str, int]) -> str:
    """Return the note on a checkpoint that is decoded while it is read; `forms` are counts of tensors by format."""
    listed = ", ".join(f"{count} tensors in {name}" for name, count in forms.items())
    return (
        f"{label} is quantised ({listed}): its weights are decoded as they are read, merged in float32 and written "
        "unquantised, unless output.quantize says otherwise"
    )


def codes_of(checkpoint: Checkpoint) -> frozenset[str]:
    """Return `find_codes` with the checkpoint's own config, which is read only if needed."""
    specs = {name: checkpoint.spec(name) for name in checkpoint.names()}
    decides = any(_is_float8(spec) or _is_unknown_code(name, spec) for name, spec in specs.items())
    return find_codes(checkpoint, read_config(checkpoint.directory) if decides else {})


def is_scale(name: str) -> bool:
    """Return whether a tensor has a name of scales or other tensors that belong to codes."""
    return _COMPANION.search(name) is not None


def _is_float8(spec: TensorSpec) -> bool:
    return spec.element.name.startswith("float8_")


def _is_code(name: str, spec: TensorSpec, checkpoint: Checkpoint, configured: bool) -> bool:
    if _is_float8(spec):
        return configured or _has_scales(name, checkpoint)
    if spec.element.name not in _INTEGERS or len(spec.shape) < 2:
        return False
    return name.endswith(("weight", "weight_packed")) or _has_scales(name, checkpoint)


def _is_unknown_code(name: str, spec: TensorSpec) -> bool:
    """Return whether a tensor of a model with unknown quantisation can only be codes."""
    counts = spec.element.name == "bool" or not spec.shape or _COUNTED.search(name)
    return is_integer(spec.element) and not counts


def _find_owners(name: str) -> list[str]:
    """Return the two innermost modules of a tensor: centroids have their own module beside the indices."""
    nearest = name.rpartition(".")[0]
    return [nearest, nearest.rpartition(".")[0]]


def _has_scales(name: str, checkpoint: Checkpoint) -> bool:
    stem, module = _PACKED.sub("", name), name.rpartition(".")[0]
    beside = [f"{module}.{each}" if module else each for each in _BESIDE]
    return any(each in checkpoint for each in (*(stem + end for end in _AFTER), *beside))
