"""Models whose weights are in several places: modules of sentence-transformers, components of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merganser.checkpoints.json_file import read_object
from merganser.confine import confine
from merganser.errors import CheckpointError
from merganser.strict_json import read_json

#: Lists the modules of a sentence-transformers model; each may have a folder with weights of its own.
MODULES = "modules.json"
#: Lists the components of a diffusers pipeline; each is a model in a folder.
_PIPELINE = "model_index.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: What names of weights begin with, up to the first point, where they are not the model's own: `2_Dense/linear.weight`.
SEPARATOR = "/"


def module_weights(directory: Path) -> dict[str, Path]:
    """Folder -> its file of weights, for the modules of a sentence-transformers model besides the first."""
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


def refuse_pipeline(directory: Path) -> None:
    """A diffusers pipeline is several models, and a merge is of one."""
    if not (directory / _PIPELINE).is_file():
        return
    listed = [key for key in read_object(directory / _PIPELINE) if not key.startswith("_") and SEPARATOR not in key]
    folders = sorted(key for key in listed if (directory / key / "config.json").is_file())
    example = f"{directory / folders[0]}" if folders else "its unet"
    raise CheckpointError(
        f"{directory}: a diffusers pipeline of several models; merge each component by itself, such as {example}"
        + (f" (it has {', '.join(folders)})" if folders else "")
    )


def weights_stem(config: Mapping[str, Any]) -> str:
    """What the files of weights are called by the library that a config is for: transformers or diffusers."""
    return "diffusion_pytorch_model" if "_class_name" in config and "model_type" not in config else "model"
