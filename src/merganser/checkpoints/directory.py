"""A Hugging Face directory: one file, or shards named by an index, and modules in their own folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View, hash_text
from merganser.checkpoints.json_file import read_object
from merganser.checkpoints.kinds import TORCH_SUFFIXES
from merganser.checkpoints.safetensors_file import SafetensorsFile
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.checkpoints.submodules import (
    SEPARATOR,
    explain_no_weights,
    find_weights,
    is_index,
    is_pipeline,
    module_weights,
    note_missing_shards,
)
from merganser.confine import confine
from merganser.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


class Directory(Checkpoint):
    """Several files as one checkpoint: those of a directory, or of an index."""

    def __init__(
        self, path: str | os.PathLike[str], shards: Mapping[str, Checkpoint] | None = None, label: str = ""
    ) -> None:
        """Open what a directory holds.

        Args:
            path: The directory, or an index in it.
            shards: Its files of weights, opened already, where they are elsewhere.
            label: What messages call it, if not by its path.
        """
        place = Path(path)
        named = place.is_file()
        self.directory = place.parent if named else place
        self.label = label or str(path)
        self._owner: dict[str, Checkpoint] = {}
        self._aliases: dict[str, str] = {}
        self._shards: dict[str, Checkpoint] = dict(shards or (_open_indexed(place) if named else _open_shards(place)))
        if not named and shards is None:
            for folder, weights in module_weights(place).items():
                self._shards |= prefix_folder(folder, _open(weights))
        for file, shard in self._shards.items():
            for name in shard.names():
                if name in self._owner:
                    raise CheckpointError(f"{path}: {name!r} is in both {self._owner[name].label} and {file}")
                self._owner[name] = shard
            self._aliases |= {k: v for k, v in shard.aliases().items() if k not in self._owner}
        self._names = list(self._owner)

    def names(self) -> Sequence[str]:
        return self._names

    def spec(self, name: str) -> TensorSpec:
        return self._shard(name).spec(self._aliases.get(name, name))

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        return self._shard(name).read(self._aliases.get(name, name), rows)

    def read_stored(self, name: str, rows: Rows | None = None) -> StoredEntries | None:
        return self._shard(name).read_stored(self._aliases.get(name, name), rows)

    def peek(self, name: str, first: int, count: int) -> bytes | None:
        return self._shard(name).peek(self._aliases.get(name, name), first, count)

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        self._shard(name).prefetch(self._aliases.get(name, name), rows)

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def overhead(self, name: str, entries: int) -> int:
        return self._shard(name).overhead(self._aliases.get(name, name), entries)

    def fingerprint(self) -> str:
        parts = sorted(f"{file} {shard.fingerprint()}" for file, shard in self._shards.items())
        return hash_text("\n".join(parts))

    def files(self) -> Sequence[Path]:
        return [path for shard in self._shards.values() for path in shard.files()]

    def notes(self) -> list[str]:
        return [f"{self.label}: {note}" for note in note_missing_shards(self._shards)]

    def _shard(self, name: str) -> Checkpoint:
        shard = self._owner.get(self._aliases.get(name, name))
        if shard is None:
            raise self.missing(name)
        return shard


class Prefixed(View):
    """A checkpoint whose names all start with a prefix."""

    def __init__(self, source: Checkpoint, prefix: str) -> None:
        super().__init__(source, source.label)
        self._own = {prefix + name: name for name in (*source.names(), *source.aliases())}
        self._names = [prefix + name for name in source.names()]
        self._aliases = {prefix + alias: prefix + name for alias, name in source.aliases().items()}

    def names(self) -> Sequence[str]:
        return self._names

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def spec(self, name: str) -> TensorSpec:
        return self.source.spec(self._own.get(name, name))

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        return self.source.read(self._own.get(name, name), rows)

    def read_stored(self, name: str, rows: Rows | None = None) -> StoredEntries | None:
        return self.source.read_stored(self._own.get(name, name), rows)

    def overhead(self, name: str, entries: int) -> int:
        return self.source.overhead(self._own.get(name, name), entries)

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        self.source.prefetch(self._own.get(name, name), rows)


def prefix_folder(folder: str, files: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """Return the files of a module's weights, with the folder before their names and those of the tensors."""
    prefix = f"{folder}{SEPARATOR}"
    return {f"{prefix}{name}": Prefixed(file, prefix) for name, file in files.items()}


def _open_shards(directory: Path) -> dict[str, Checkpoint]:
    if is_pipeline(directory):
        return {}
    if (file := find_weights(directory)) is not None:
        return _open(file)
    several = sorted(directory.iterdir())
    raise CheckpointError(
        explain_no_weights(directory, [p for p in several if p.suffix == ".safetensors"] or several[:8])
    )


def _open(file: Path) -> dict[str, Checkpoint]:
    return _open_indexed(file) if is_index(file.name) else {file.name: open_file(file)}


def open_file(file: Path) -> Checkpoint:
    """Open a file of torch or safetensors."""
    if file.suffix not in TORCH_SUFFIXES:
        return SafetensorsFile(file)
    from merganser.checkpoints.torch_file import TorchFile

    return TorchFile(file)


def weight_files(index: Path) -> dict[str, Path]:
    """Return the files that an index names, and where they would be."""
    paths: dict[str, Path] = {}
    for file in _weight_map(index).values():
        if not isinstance(file, str) or file not in paths:
            path = confine(index.parent, file, f"{index}: weight_map")
            paths[file] = path
    return paths


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index, finite=True).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: not a weight index: it has no object 'weight_map'")
    return weight_map


def _open_indexed(index: Path) -> dict[str, Checkpoint]:
    shards: dict[str, Checkpoint] = {}
    for file, path in sorted(weight_files(index).items()):
        if not path.is_file():
            raise CheckpointError(f"{index}: names {file!r}, which does not exist; is the download complete?")
        shards[file] = open_file(path)
    check_index(index, shards)
    return shards


def check_index(index: Path, shards: Mapping[str, Checkpoint]) -> None:
    """Refuse an index that names tensors which are not in their files."""
    have = {file: set(shard.names()) | set(shard.aliases()) for file, shard in shards.items()}
    for name, file in _weight_map(index).items():
        if name not in have[file]:
            raise CheckpointError(f"{index}: says {name!r} is in {file}, which has no such tensor")
