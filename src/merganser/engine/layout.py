"""Lay out the files of the output: all shapes are known, so headers and offsets are computed first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from merganser.checkpoints.safetensors_file import CODES, METADATA
from merganser.engine.plan import Output, Plan
from merganser.errors import CheckpointError


@dataclass(frozen=True)
class Shard:
    """A planned file: its header and, for each tensor, the offset of its first byte."""

    file: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


def lay_out(plan: Plan) -> list[Shard]:
    """Return shards of at most `plan.shard_size` bytes of weights, in plan order; a larger tensor gets its own shard.

    Weights of modules with a folder of their own (`Sidecars.modules`) go to a file in that folder, under their names
    there. If only one file is written (`Sidecars.single`), it contains all weights.
    """
    stem = plan.sidecars.weights
    if plan.sidecars.gguf is not None:
        from merganser.engine.gguf_output import gguf_header

        return [Shard("model.gguf", *gguf_header(plan.sidecars.gguf, plan.sidecars.fingerprint))]
    if plan.sidecars.single:
        for output in plan.outputs:
            _check_storable(output)
        return [_shard(f"{stem}.safetensors", plan.outputs, plan.aliases, made_by=plan.sidecars.fingerprint)]
    files = {f"{file.rpartition('/')[0]}/": file for file in plan.sidecars.modules}
    apart: dict[str, list[Output]] = {prefix: [] for prefix in files}
    groups: list[list[Output]] = [[]]
    held = 0
    for output in plan.outputs:
        _check_storable(output)
        if (prefix := next((prefix for prefix in apart if output.name.startswith(prefix)), None)) is not None:
            apart[prefix].append(output)
            continue
        if groups[-1] and held + output.spec.nbytes > plan.shard_size:
            groups.append([])
            held = 0
        groups[-1].append(output)
        held += output.spec.nbytes
    modules = [_shard(files[prefix], inner, plan.aliases, prefix) for prefix, inner in apart.items()]
    if modules and not groups[0]:  # a pipeline has no weights at the top level
        return modules
    if len(groups) == 1:
        return [_shard(f"{stem}.safetensors", groups[0], plan.aliases), *modules]
    names = [f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return [*(_shard(name, group, plan.aliases) for name, group in zip(names, groups, strict=True)), *modules]


def _check_storable(output: Output) -> None:
    reason = ""
    if output.name == METADATA:
        reason = "the format reserves this name"
    elif output.spec.element.name not in CODES:
        reason = f"the format does not support {output.spec.element}"
    if reason:
        raise CheckpointError(
            f"{output.name!r} cannot be written to safetensors: {reason}; "
            f"to leave it out: output.exclude: [{output.name!r}]"
        )


def make_index(shards: Sequence[Shard], plan: Plan) -> tuple[str, bytes] | None:
    """Return name and content of the index that Hugging Face loaders expect with several shards; None for one shard."""
    own = [shard for shard in shards if "/" not in shard.file]
    if len(own) <= 1:
        return None
    weight_map = {name: shard.file for shard in own for name in shard.offsets}
    total = sum(output.spec.nbytes for output in plan.outputs if output.name in weight_map)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    stem = plan.sidecars.weights
    return f"{stem}.safetensors.index.json", (json.dumps(content, indent=2) + "\n").encode()


def _shard(
    file: str, outputs: Sequence[Output], aliases: Mapping[str, str], prefix: str = "", made_by: str = ""
) -> Shard:
    # Wide types first, so that every tensor is aligned to its item size.
    ordered = sorted(outputs, key=lambda output: -output.spec.element.itemsize)
    names = {output.name for output in outputs}
    tied = {a.removeprefix(prefix): name.removeprefix(prefix) for a, name in aliases.items() if name in names}
    told = {"merganser": made_by} if made_by else {}
    header: dict[str, object] = {METADATA: {"format": "pt", **told, **tied}}
    places: dict[str, int] = {}
    end = 0
    for output in ordered:
        places[output.name] = end
        end += output.spec.nbytes
        header[output.name.removeprefix(prefix)] = {
            "dtype": CODES[output.spec.element.name],
            "shape": list(output.spec.shape),
            "data_offsets": [places[output.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    origin = 8 + len(text)
    return Shard(
        file, len(text).to_bytes(8, "little") + text, {n: origin + at for n, at in places.items()}, origin + end
    )
