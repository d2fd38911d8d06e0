"""An alignment on disk: permutations as one safetensors file, with the symmetry they belong to in its header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from merganser.align.ascent import Step
from merganser.align.permutations import Permutations, check
from merganser.align.symmetries import Symmetry
from merganser.errors import CheckpointError, InputError
from merganser.strict_json import parse_json


@dataclass(frozen=True)
class Record:
    """What is kept of a universe without its weights: permutations mean something for the models of these
    fingerprints only. Array `i/atom` of the file is the permutation of model i."""

    symmetry: Symmetry
    models: tuple[str, ...]
    permutations: tuple[Permutations, ...]
    objective: float
    trace: tuple[Step, ...] = ()

    def save(self, path: str | PathLike[str]) -> None:
        arrays = {
            f"{model}/{name}": np.ascontiguousarray(index)
            for model, permutations in enumerate(self.permutations)
            for name, index in permutations.items()
        }
        found = {
            "models": self.models,
            "objective": self.objective,
            "trace": [asdict(step) for step in self.trace],
        }
        try:
            save_file(arrays, path, metadata={"symmetry": self.symmetry.to_json(), "universe": json.dumps(found)})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write permutations to {path}: {error}") from None

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Record:
        """Read and check a file that `save` wrote."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read permutations from {path}: {error}") from None
        if not {"symmetry", "universe"} <= metadata.keys():
            raise CheckpointError(f"{path}: no symmetry in its header; was it written by an alignment?")
        try:
            symmetry, found = Symmetry.from_json(metadata["symmetry"]), parse_json(metadata["universe"])
            models = tuple(found["models"])
            permutations = _split_by_model(arrays, len(models))
            for own in permutations:
                check(symmetry, own)
            trace = tuple(Step(**step) for step in found["trace"])
            return cls(symmetry, models, permutations, float(found["objective"]), trace)
        except (InputError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: not the permutations of an alignment: {error}") from error


def _split_by_model(arrays: Mapping[str, np.ndarray], models: int) -> tuple[Permutations, ...]:
    """Return the arrays of each model."""
    split = [(int(model), name, index) for key, index in arrays.items() for model, name in [key.split("/", 1)]]
    found: list[Permutations] = [{} for _ in range(models)]
    for model, name, index in split:
        if not 0 <= model < len(found):
            raise ValueError(f"a permutation of model {model}, of {len(found)} models")
        found[model][name] = index
    return tuple(found)
