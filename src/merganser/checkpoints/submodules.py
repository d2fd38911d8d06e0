"""Models whose weights are in several places: modules of sentence-transformers, components of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merganser.checkpoints.json_file import read_config, read_object
from merganser.confine import confine
from merganser.errors import CheckpointError
from merganser.strict_json import read_json

#: Lists the modules of a sentence-transformers model; each may have a folder with weights of its own.
MODULES = "modules.json"
#: Lists the components of a diffusers pipeline; each is a model in a folder.
PIPELINE = "model_index.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: What a directory is read from, the first that is there: in the order of transformers, then of diffusers.
_CHOICES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.bin",
)
#: What names of weights begin with, up to the first point, where they are not the model's own: `2_Dense/linear.weight`.
SEPARATOR = "/"


def module_weights(directory: Path) -> dict[str, Path]:
    """Folder -> its file of weights, for the modules of a sentence-transformers model besides the first, and for the
    components of a diffusers pipeline."""
    if is_pipeline(directory):
        return _components(directory)
    file = directory / MODULES
    if not file.is_file():
        return {}
    try:
        modules = read_json(file, finite=True)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"{file}: expected a list of modules")
    found: dict[str, Path] = {}
    for folder in (each.get("path") for each in modules):
        if folder in ("", None):  # the transformer, in the directory itself
            continue
        place = confine(directory, folder, f"{file}: path")
        weights = next((place / name for name in _WEIGHTS if (place / name).is_file()), None)
        if weights is not None:
            found[str(folder)] = weights
    return found


def _components(directory: Path) -> dict[str, Path]:
    """Folder -> its file of weights, for the components of a diffusers pipeline that have any."""
    index = directory / PIPELINE
    listed = [key for key, value in read_object(index).items() if not key.startswith("_") and isinstance(value, list)]
    places = {key: confine(directory, key, str(index)) for key in listed if SEPARATOR not in key}
    found = {key: file for key, place in places.items() if place.is_dir() and (file := find_weights(place)) is not None}
    if not found:
        raise CheckpointError(f"{directory}: a diffusers pipeline, none of whose components is here with its weights")
    return found


def find_weights(directory: Path) -> Path | None:
    """Return the file, or the index of files, that a directory's weights are read from; None if there is none."""
    for name in _CHOICES:
        if (directory / name).is_file():
            return directory / name
    lone = [p for p in directory.iterdir() if p.suffix == ".safetensors" and not p.name.startswith("adapter")]
    return lone[0] if len(lone) == 1 else None


def is_pipeline(directory: Path | None) -> bool:
    """Whether a directory is a diffusers pipeline, whose weights are all in folders of its components."""
    return directory is not None and (directory / PIPELINE).is_file()


def written_file(directory: Path, folder: str) -> str:
    """Return the file that the weights of a module are written to, as the library that reads it calls it."""
    stem = weights_stem(read_config(directory / folder)) if is_pipeline(directory) else "model"
    return f"{folder}{SEPARATOR}{stem}.safetensors"


def weights_stem(config: Mapping[str, Any]) -> str:
    """What the files of weights are called by the library that a config is for: transformers or diffusers."""
    return "diffusion_pytorch_model" if "_class_name" in config and "model_type" not in config else "model"
