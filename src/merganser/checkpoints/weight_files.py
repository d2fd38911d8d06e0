"""Files of weights as a lock file knows them: a header, and the bytes of every tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from merganser.checkpoints.gguf_file import GGUFFile
from merganser.checkpoints.safetensors_file import SafetensorsFile

WeightFile: TypeAlias = SafetensorsFile | GGUFFile


def open_weights(path: Path) -> WeightFile:
    """Open a file of weights.

    Raises:
        CheckpointError: If the file is damaged.
        FileNotFoundError: If there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(path)
    return GGUFFile(path) if path.suffix == ".gguf" else SafetensorsFile(path)


def read_header(file: WeightFile) -> bytes:
    """Return what stands before the weights: names, dtypes, shapes and settings."""
    if isinstance(file, GGUFFile):
        starts = [each.start for each in file.header.tensors.values()]
    else:
        starts = [each.start for each in file.entries.values()]
    first = min(starts, default=file.path.stat().st_size)
    with file.path.open("rb") as opened:
        return opened.read(first)


def name_in_file(file: str, name: str) -> str:
    """Return the name in its file of an output: a file in a folder leaves the folder's prefix out."""
    folder, _, _ = file.rpartition("/")
    return name.removeprefix(f"{folder}/") if folder else name
