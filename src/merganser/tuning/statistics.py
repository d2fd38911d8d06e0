"""Statistics of a model on data (Fisher, Gram, components): a safetensors file beside its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from merganser.checkpoints.safetensors_file import SafetensorsFile
from merganser.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class Statistics:
    """One tensor per parameter name, a mean over `samples`; `kind` is `"fisher"`, `"gram"` or `"components"`."""

    kind: str
    tensors: dict[str, Tensor]
    samples: int

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a safetensors file, which opens like any checkpoint."""
        metadata = {"format": "pt", "kind": self.kind, "samples": str(self.samples)}
        tensors = {name: value.contiguous() for name, value in self.tensors.items()}
        return replace_file(Path(path), lambda partial: save_file(tensors, partial, metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str], kind: str | None = None) -> Statistics:
        """Read a file written by `save`; with `kind`, refuse other kinds."""
        try:
            file = SafetensorsFile(path)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"{path}: cannot be read as statistics: {error}") from error
        metadata = file.metadata
        if "kind" not in metadata or not metadata.get("samples", "").isdecimal():
            raise CheckpointError(
                f"{path}: this file does not contain statistics (its metadata lacks kind and samples)"
            )
        if kind is not None and metadata["kind"] != kind:
            raise CheckpointError(f"{path}: statistics of kind {metadata['kind']!r}, expected {kind!r}")
        return cls(metadata["kind"], {name: file.read(name).clone() for name in file.names()}, int(metadata["samples"]))


def replace_file(path: Path, write: Callable[[Path], object]) -> Path:
    """Write a file that gets its name, or replaces the existing one, when it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    write(partial)
    os.replace(partial, path)
    return path
