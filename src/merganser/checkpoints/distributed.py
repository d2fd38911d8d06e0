"""A torch distributed checkpoint (DCP): a directory with `.metadata` and the chunks of tensors in `.distcp` files."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, select_rows
from merganser.checkpoints.dtypes import Element
from merganser.checkpoints.inert_pickle import InertRecord, load_inert, read_sizes
from merganser.checkpoints.kinds import DISTRIBUTED_METADATA
from merganser.checkpoints.reads import note_read
from merganser.checkpoints.torch_archive import read_torch_archive
from merganser.confine import confine
from merganser.errors import CheckpointError
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_ACCEPTED = (
    "torch.distributed.checkpoint.",
    "torch.Size",
    "torch.serialization._get_layout",
    "pathlib.",
    "builtins.getattr",
)
#: Keys that contain the state of a model, and keys that are not part of it.
_OUTER = ("model", "module", "state_dict", "model_state_dict", "app")
_OTHER = ("optimizer", "optim", "optimizers", "optimizer_state_dict", "lr_scheduler", "dataloader", "train_state")


@dataclass(frozen=True)
class _Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    span: tuple[int, int]


class DistributedCheckpoint(Checkpoint):
    """The tensors of the model in a distributed checkpoint, under their names there, without optimiser states.

    Args:
        path: The directory.

    Raises:
        CheckpointError: If the metadata is damaged, contains other objects, or does not fit the files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = Path(path)
        self.label = str(path)
        file = self.directory / DISTRIBUTED_METADATA
        try:
            content, _ = load_inert(file.read_bytes(), lambda each: each.startswith(_ACCEPTED) or _is_dtype(each))
            self._tensors = _tensors(content, self.directory)
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise CheckpointError(f"{file}: not the metadata of a distributed checkpoint: {error}") from None
        if not self._tensors:
            raise CheckpointError(f"{file}: it lists no tensors of a model")

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        return self._find(name)[0]

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        spec, chunks = self._find(name)
        note_read(self, name)
        first, last = rows or (0, spec.shape[0] if spec.shape else 1)
        if len(chunks) == 1 or not spec.shape:
            return select_rows(self._chunk(name, chunks[0]), rows)
        found = torch.empty((last - first, *spec.shape[1:]), dtype=spec.dtype)
        for chunk in chunks:
            start, stop = max(first, chunk.offsets[0]), min(last, chunk.offsets[0] + chunk.sizes[0])
            if start < stop:
                inner = [slice(o, o + n) for o, n in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)]
                part = self._chunk(name, chunk)[start - chunk.offsets[0] : stop - chunk.offsets[0]]
                place = (slice(start - first, stop - first), *inner)
                found[place] = part
        return found

    def overhead(self, name: str, entries: int) -> int:
        return entries * self.spec(name).element.itemsize

    def files(self) -> Sequence[Path]:
        used = {chunk.file for _, chunks in self._tensors.values() for chunk in chunks}
        return [Path(str(self.directory)) / DISTRIBUTED_METADATA, *sorted(used)]

    def fingerprint(self) -> str:
        digest = hashlib.sha256((self.files()[0]).read_bytes())
        for file in self.files()[1:]:
            with file.open("rb") as opened:
                size = file.stat().st_size
                for start in range(0, size, max(4096, size // 64)):
                    opened.seek(start)
                    digest.update(opened.read(4096))
        return digest.hexdigest()

    def _find(self, name: str) -> tuple[TensorSpec, list[_Chunk]]:
        if name not in self._tensors:
            raise self.missing(name)
        return self._tensors[name]

    def _chunk(self, name: str, chunk: _Chunk) -> Tensor:
        try:
            state = chunk.file.stat()
            tensor = _read_chunk(chunk.file, chunk.span, (state.st_ino, state.st_size, state.st_mtime_ns))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{chunk.file}: {name!r} cannot be read: {error}") from None
        if (
            not isinstance(tensor, torch.Tensor)
            or tuple(tensor.shape) != chunk.sizes
            or tensor.dtype != self.spec(name).dtype
        ):
            raise CheckpointError(f"{chunk.file}: {name!r} does not match {DISTRIBUTED_METADATA}")
        return tensor


@functools.lru_cache(maxsize=64)
def _read_chunk(file: Path, span: tuple[int, int], stamp: tuple[int, int, int]) -> Any:
    """The content of an archive in a file; `stamp` is there to forget it when the file changes."""
    return read_torch_archive(file, lambda _: False, span)[0]


def _is_dtype(path: str) -> bool:
    return path.startswith("torch.") and path.count(".") == 1 and path.islower()


def _tensors(content: Any, directory: Path) -> dict[str, tuple[TensorSpec, list[_Chunk]]]:
    """Return the tensors of the model with their chunks, checked against their files."""
    listed: Mapping[str, Any] = content.state["state_dict_metadata"]
    paths: Mapping[str, Any] = content.state.get("planner_data") or {}
    stored: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in content.state["storage_data"].items():
        if index.state.get("offset") is not None:
            stored[index.state["fqn"], read_sizes(index.state["offset"])] = info.state
    found: dict[str, tuple[TensorSpec, list[_Chunk]]] = {}
    for key, about in listed.items():
        name = _name(paths.get(key, (key,)))
        if name is None or not isinstance(about, InertRecord) or "chunks" not in about.state:
            continue
        spec = TensorSpec(read_sizes(about.state["size"]), _dtype(about.state["properties"]))
        chunks = [_locate(each, stored, key, directory) for each in about.state["chunks"]]
        _check_cover(key, spec, chunks)
        if name in found:
            raise ValueError(f"{name!r} is listed twice")
        found[name] = spec, chunks
    return found


def _name(path: Any) -> str | None:
    """Return the name of a tensor in the model's own state; None if it belongs to something else."""
    steps = [str(step) for step in path] if isinstance(path, (tuple, list)) else [str(path)]
    while len(steps) > 1 and steps[0] in _OUTER:
        steps = steps[1:]
    is_optimizer = len(steps) > 2 and steps[1] == "state"  # whatever a trainer calls it
    return None if is_optimizer or (len(steps) > 1 and steps[0] in _OTHER) else ".".join(steps)


def _dtype(properties: InertRecord) -> Element:
    state = properties.state.get("state", properties.state)
    kind = state["dtype"] if isinstance(state, dict) else state[0]
    if not (isinstance(kind, type) and issubclass(kind, InertRecord)):
        raise ValueError("a tensor has no dtype")
    return Element.of(kind.path.removeprefix("torch."))


def _locate(about: InertRecord, stored: Mapping[tuple[str, tuple[int, ...]], Any], key: str, directory: Path) -> _Chunk:
    offsets, sizes = read_sizes(about.state["offsets"]), read_sizes(about.state["sizes"])
    info = stored[key, offsets]
    if info.get("transform_descriptors"):
        raise ValueError(f"{key!r} is stored in an unknown format ({str(info['transform_descriptors'])[:60]})")
    file = confine(directory, info["relative_path"], str(directory / DISTRIBUTED_METADATA))
    start, length = read_sizes((info["offset"], info["length"]))
    if not file.is_file() or start + length > file.stat().st_size:
        raise ValueError(f"a part of {key!r} is not in {file.name}; is the copy complete?")
    return _Chunk(offsets, sizes, file, (start, start + length))


def _check_cover(key: str, spec: TensorSpec, chunks: Sequence[_Chunk]) -> None:
    """Refuse chunks that leave out entries or reach beyond the tensor."""
    held = sum(math.prod(chunk.sizes) for chunk in chunks)
    inside = all(
        len(chunk.offsets) == len(chunk.sizes) == len(spec.shape)
        and all(o + n <= size for o, n, size in zip(chunk.offsets, chunk.sizes, spec.shape, strict=True))
        for chunk in chunks
    )
    room = sum(chunk.span[1] - chunk.span[0] for chunk in chunks)
    if not inside or held != spec.numel or len({chunk.offsets for chunk in chunks}) < len(chunks) or spec.nbytes > room:
        raise ValueError(f"the parts of {key!r} do not make up {spec}")
