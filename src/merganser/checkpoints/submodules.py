"""Models whose weights are in several places: modules of sentence-transformers, components of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merganser.checkpoints.json_file import read_config, read_object, read_value
from merganser.confine import confine
from merganser.errors import CheckpointError

#: Lists the modules of a sentence-transformers model; each may have a folder with its own weights.
MODULES = "modules.json"
#: Lists the components of a diffusers pipeline; each is a model in a folder.
PIPELINE = "model_index.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: Files that a directory is read from, in order of precedence: transformers, then diffusers.
_CHOICES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.bin",
)
#: Prefix of weights of a module, before the first dot: `2_Dense/linear.weight`.
SEPARATOR = "/"


def module_weights(directory: Path) -> dict[str, Path]:
    """Return a mapping of folder to file of weights, for the modules of a sentence-transformers model except the
    first, and for the components of a diffusers pipeline.
    """
    if is_pipeline(directory):
        return _components(directory)
    file = directory / MODULES
    if not file.is_file():
        return {}
    modules = read_value(file, finite=True)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"{file}: expected a list of modules")
    found: dict[str, Path] = {}
    for folder in (each.get("path") for each in modules):
        if folder in ("", None):  # the transformer is in the directory itself
            continue
        place = confine(directory, folder, f"{file}: path")
        weights = next((place / name for name in _WEIGHTS if (place / name).is_file()), None)
        if weights is not None:
            found[str(folder)] = weights
    return found


def _components(directory: Path) -> dict[str, Path]:
    """Return a mapping of folder to file of weights, for the components of a diffusers pipeline that have weights."""
    index = directory / PIPELINE
    listed = [key for key, value in read_object(index).items() if not key.startswith("_") and isinstance(value, list)]
    places = {key: confine(directory, key, str(index)) for key in listed if SEPARATOR not in key}
    found = {key: file for key, place in places.items() if place.is_dir() and (file := find_weights(place)) is not None}
    if not found:
        raise CheckpointError(f"{directory}: a diffusers pipeline without the weights of any component")
    return found


def find_weights(directory: Path) -> Path | None:
    """Return the file, or the index of files, that a directory's weights are read from; None if there is none."""
    for name in _CHOICES:
        if (directory / name).is_file():
            return directory / name
    lone = [p for p in directory.iterdir() if p.suffix == ".safetensors" and not p.name.startswith("adapter")]
    return lone[0] if len(lone) == 1 else None


def is_pipeline(directory: Path | None) -> bool:
    """Return whether a directory is a diffusers pipeline, whose weights are all in the folders of components."""
    return directory is not None and (directory / PIPELINE).is_file()


def written_file(directory: Path, folder: str) -> str:
    """Return the name of the file that the weights of a module are written to."""
    stem = weights_stem(read_config(directory / folder)) if is_pipeline(directory) else "model"
    return f"{folder}{SEPARATOR}{stem}.safetensors"


def weights_stem(config: Mapping[str, Any]) -> str:
    """Return the stem of weight files for the library of a config: transformers or diffusers."""
    return "diffusion_pytorch_model" if "_class_name" in config and "model_type" not in config else "model"
