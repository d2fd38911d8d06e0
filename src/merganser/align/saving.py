"""Write the models of a universe as checkpoints: each in the common space, and their mean."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from merganser.align.symmetries import Symmetry
from merganser.align.universes import Universe
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.memory import StateDict
from merganser.recipes.saving import save


def save_aligned(universe: Universe, models: Mapping[str, Checkpoint], directory: str | os.PathLike[str]) -> None:
    """Write everything that was found for a universe of checkpoints, except how good it is.

    Writes `aligned/NAME` for every model (the same function, in the common space), their mean `merged`,
    `permutations.safetensors` and `symmetry.json`. Models with a config become directories that transformers loads,
    others files with the suffix `.safetensors`.

    Args:
        universe: The universe.
        models: The checkpoints that it was found for, by name, in its order.
        directory: An empty directory, or one to create.

    Example:
        >>> models = {"math": mg.open("math"), "code": mg.open("code")}
        >>> universe = mg.align.universe([*models.values()], mg.align.symmetry(base, images))
        >>> mg.align.save_aligned(universe, models, "found")
        >>> sorted(mg.open("found/merged.safetensors")) == sorted(models["math"])
        True
    """
    place = Path(directory)
    (place / "aligned").mkdir(parents=True)
    stored = [list_stored_names({*model.names(), *model.aliases()}, universe.symmetry) for model in models.values()]
    for position, (name, model) in enumerate(models.items()):
        _save(universe.to_universe(position), stored[position], model, place / "aligned" / name)
    _save(universe.merged(), stored[0], next(iter(models.values())), place / "merged")
    universe.save(place / "permutations.safetensors")
    (place / "symmetry.json").write_text(universe.symmetry.to_json() + "\n", encoding="utf-8")


def has_config(model: Checkpoint) -> bool:
    """Return whether a checkpoint has a config beside its weights, as models of transformers have."""
    return model.directory is not None and (model.directory / "config.json").is_file()


def list_stored_names(names: Collection[str], symmetry: Symmetry) -> set[str]:
    """Return the stored names without those that are tied to another stored name."""
    first: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name in symmetry.aliases, name)):
        first.setdefault(symmetry.aliases.get(name, name), name)
    return set(first.values())


def _save(state: Mapping[str, Tensor], kept: Collection[str], model: Checkpoint, place: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in state.items() if name in kept}
    if not has_config(model):
        save_file(tensors, place.with_name(f"{place.name}.safetensors"), {"format": "pt"})
        return
    view = StateDict(tensors, model.label)
    view.directory = model.directory
    save(view, place)
