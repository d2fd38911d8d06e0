"""Models whose weights are in several places: modules of sentence-transformers, components of diffusers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from merganser.checkpoints.json_file import read_config, read_object, read_value
from merganser.checkpoints.kinds import TORCH_SUFFIXES
from merganser.confine import confine
from merganser.errors import CheckpointError

#: Lists the modules of a sentence-transformers model; each may have a folder with its own weights.
MODULES = "modules.json"
#: Lists the components of a diffusers pipeline; each is a model in a folder.
PIPELINE = "model_index.json"
#: Files that a module's weights are read from, in order of precedence.
MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: Files that a directory is read from, in order of precedence: transformers, then diffusers.
CHOICES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.bin",
)
#: The name of an index, also of a variant: `model.safetensors.index.fp16.json`.
_INDEX = re.compile(r".+\.index(\.[^.]+)?\.json")
#: The name of one of several files, which only an index tells apart from a whole model.
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.[a-z]+)")
#: Prefix of weights of a module, before the first dot: `2_Dense/linear.weight`.
SEPARATOR = "/"


def module_weights(directory: Path) -> dict[str, Path]:
    """Return a mapping of folder to file of weights, for the modules of a sentence-transformers model except the
    first, and for the components of a diffusers pipeline.
    """
    if is_pipeline(directory):
        return _find_components(directory)
    choices = {folder: [directory / folder / name for name in MODULE_WEIGHTS] for folder in module_folders(directory)}
    found = {folder: [file for file in files if file.is_file()] for folder, files in choices.items()}
    return {folder: files[0] for folder, files in found.items() if files}


def module_folders(directory: Path) -> list[str]:
    """Return the folders of the modules of a sentence-transformers model, except the first; none for other models."""
    file = directory / MODULES
    if not file.is_file():
        return []
    modules = read_value(file, finite=True)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"{file}: expected a list of modules")
    # The transformer is in the directory itself.
    folders = [folder for each in modules if (folder := each.get("path")) not in ("", None)]
    for folder in folders:
        confine(directory, folder, f"{file}: path")
    return folders


def _find_components(directory: Path) -> dict[str, Path]:
    """Return a mapping of folder to file of weights, for the components of a diffusers pipeline that have weights."""
    index = directory / PIPELINE
    listed = [key for key, value in read_object(index).items() if not key.startswith("_") and isinstance(value, list)]
    places = {key: confine(directory, key, str(index)) for key in listed if SEPARATOR not in key}
    found = {key: file for key, place in places.items() if place.is_dir() and (file := find_weights(place)) is not None}
    for key, place in places.items():
        if key not in found and place.is_dir() and (unread := _find_weights(place)):
            raise CheckpointError(explain_no_weights(place, unread))
    if not found:
        raise CheckpointError(f"{directory}: a diffusers pipeline without the weights of any component")
    return found


def is_index(name: str) -> bool:
    """Return whether a file of this name lists which tensor is in which file."""
    return _INDEX.fullmatch(name) is not None


def note_missing_shards(files: Iterable[str]) -> list[str]:
    """Return a note on every sequence of files like `model-00001-of-00003.safetensors` of which some are missing."""
    have: dict[tuple[str, str, str], set[int]] = {}
    for found in filter(None, map(_SHARD.fullmatch, files)):
        have.setdefault((found[1], found[3], found[4]), set()).add(int(found[2]))
    return [
        f"the index names {len(numbers)} of the {int(count)} files {stem}-…-of-{count}{suffix}: weights in the others "
        "are not read, as in transformers; is the index complete?"
        for (stem, count, suffix), numbers in have.items()
        if len(numbers) < int(count)
    ]


def find_weights(directory: Path) -> Path | None:
    """Return the file, or the index of files, that a directory's weights are read from; None if there is none, or
    several that could be meant.

    Files of another name count if they are alone: a variant (`model.fp16.safetensors`), or a name of one's own.
    """
    for name in CHOICES:
        if (directory / name).is_file():
            return directory / name
    indexes = [path for path in directory.iterdir() if ".safetensors.index." in path.name and is_index(path.name)]
    whole = [p for p in _find_weights(directory) if p.suffix == ".safetensors" and not _SHARD.fullmatch(p.name)]
    found = indexes or whole
    return found[0] if len(found) == 1 else None


def _find_weights(directory: Path) -> list[Path]:
    """Return the files in a directory that may be weights of a model."""
    kinds = (".safetensors", *TORCH_SUFFIXES)
    return sorted(p for p in directory.iterdir() if p.suffix in kinds and not p.name.startswith("adapter"))


def explain_no_weights(directory: Path, files: Sequence[Path]) -> str:
    """Return the message for a directory without weights that can be read, with the files that are there."""
    found = ", ".join(file.name for file in files) or "nothing"
    missing = (
        "; the index of these shards is missing: is the download complete?"
        if any(_SHARD.fullmatch(file.name) for file in files)
        else ""
    )
    return f"{directory}: no model.safetensors, no index and no pytorch_model.bin; it contains {found}{missing}"


def is_pipeline(directory: Path | None) -> bool:
    """Return whether a directory is a diffusers pipeline, whose weights are all in the folders of components."""
    return directory is not None and (directory / PIPELINE).is_file()


def name_written_file(directory: Path, folder: str) -> str:
    """Return the name of the file that the weights of a module are written to."""
    stem = weights_stem(read_config(directory / folder)) if is_pipeline(directory) else "model"
    return f"{folder}{SEPARATOR}{stem}.safetensors"


def weights_stem(config: Mapping[str, Any]) -> str:
    """Return the stem of weight files for the library of a config: transformers or diffusers."""
    return "diffusion_pytorch_model" if "_class_name" in config and "model_type" not in config else "model"
