"""Where every tensor of the output will lie: all shapes are known, so headers and offsets come first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from merganser.checkpoints.safetensors_file import CODES, METADATA
from merganser.errors import CheckpointError
from merganser.recipes.plan import Output, Plan


@dataclass(frozen=True)
class Shard:
    """A file to be: its header and, for each tensor, the offset of its first byte in the file."""

    file: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


def lay_out(plan: Plan) -> list[Shard]:
    """Shards of at most `plan.shard_size` bytes of weights (a larger tensor has one to itself), in plan order."""
    groups: list[list[Output]] = [[]]
    held = 0
    for output in plan.outputs:
        _check_storable(output)
        if groups[-1] and held + output.spec.nbytes > plan.shard_size:
            groups.append([])
            held = 0
        groups[-1].append(output)
        held += output.spec.nbytes
    if len(groups) == 1:
        return [_shard("model.safetensors", groups[0], plan.aliases)]
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return [_shard(name, group, plan.aliases) for name, group in zip(names, groups, strict=True)]


def _check_storable(output: Output) -> None:
    reason = ""
    if output.name == METADATA:
        reason = "the format keeps this name for itself"
    elif output.spec.dtype not in CODES:
        reason = f"the format has no {str(output.spec.dtype).removeprefix('torch.')}"
    if reason:
        raise CheckpointError(
            f"{output.name!r} cannot be written to safetensors: {reason}; "
            f"to leave it out: output.exclude: [{output.name!r}]"
        )


def index_json(shards: Sequence[Shard], plan: Plan) -> bytes:
    """The index Hugging Face loaders expect beside several shards."""
    weight_map = {name: shard.file for shard in shards for name in shard.offsets}
    content = {"metadata": {"total_size": plan.bytes_out}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()


def _shard(file: str, outputs: Sequence[Output], aliases: Mapping[str, str]) -> Shard:
    # Wide types first, so that every tensor is aligned to its own item size.
    ordered = sorted(outputs, key=lambda output: -output.spec.dtype.itemsize)
    names = {output.name for output in outputs}
    tied = {alias: name for alias, name in aliases.items() if name in names}
    header: dict[str, object] = {METADATA: {"format": "pt", **tied}}
    places: dict[str, int] = {}
    end = 0
    for output in ordered:
        places[output.name] = end
        end += output.spec.nbytes
        header[output.name] = {
            "dtype": CODES[output.spec.dtype],
            "shape": list(output.spec.shape),
            "data_offsets": [places[output.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    origin = 8 + len(text)
    return Shard(
        file, len(text).to_bytes(8, "little") + text, {n: origin + at for n, at in places.items()}, origin + end
    )
