"""Compute contenders as merges in memory.

A method is run once, at scale 1; another scale is θ_0 + α (merged − θ_0), without a decomposition. As many merges are
kept as fit into memory. The merge that is checked and written in the end is computed by the method at its scale.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from merganser import recipes
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.references import exists, parts
from merganser.evolve.design import BASE
from merganser.evolve.fitness import endpoint_document
from merganser.library.unfolding import is_matrix
from merganser.methods.registry import lookup, parameters
from merganser.recipes.running import open_labelled
from merganser.tuning.autopilot.contenders import PLAIN, Contender
from merganser.tuning.sweep import Variant


class Merges:
    """The base, its experts, and contenders made of them.

    Args:
        base: The model the experts were fine-tuned from.
        experts: The experts by name.
        seed: The seed of random methods.
        memory: The bytes of merges to keep; one is always kept.
    """

    def __init__(self, base: Reference, experts: Mapping[str, Reference], seed: int, memory: int) -> None:
        self.base_name = next(name for name in (BASE, f"the {BASE}", f"the {BASE} itself") if name not in experts)
        self.paths = {name: _path(model, name) for name, model in {**experts, self.base_name: base}.items()}
        models = {**experts, self.base_name: base}
        self.opened = {path: open_labelled(models[name], path) for name, path in self.paths.items()}
        self.seed = seed
        self.memory = memory
        self._kept: dict[str, Checkpoint] = {}

    @property
    def base(self) -> Checkpoint:
        return self.opened[self.paths[self.base_name]]

    @property
    def experts(self) -> dict[str, Checkpoint]:
        return {name: self.opened[path] for name, path in self.paths.items() if name != self.base_name}

    def document(self, contender: Contender) -> dict[str, Any]:
        """Return the recipe of a contender."""
        base = self.paths[self.base_name]
        if not contender.is_merge:
            other = next(path for name, path in self.paths.items() if name != self.base_name)
            path = other if contender.name == self.base_name else self.paths[contender.name]
            template = {"base": base, "models": [{"path": path}]}
            label = BASE if contender.name == self.base_name else contender.name
            return endpoint_document(template, [] if label == BASE else [label], label)
        return {
            "method": contender.name,
            "base": base,
            "models": [{"path": self.paths[name]} for name in contender.experts],
            "parameters": {**self._shapes(contender.name), **contender.parameters},
            "seed": self.seed,
        }

    def _shapes(self, method: str) -> dict[str, bool]:
        """Return what tells a method for matrices to decompose kernels too, where the base has any."""
        declared = "convolutions" in parameters(lookup(method))
        return {"convolutions": True} if declared and self._convolutional else {}

    @cached_property
    def _convolutional(self) -> bool:
        shapes = [self.base.spec(name).shape for name in self.base.names()]
        return any(len(shape) > 3 and is_matrix(shape) for shape in shapes)

    def exact(self, contender: Contender) -> Variant:
        """Return a contender computed by its recipe."""
        return self.variant(self.document(contender))

    def quick(self, contender: Contender) -> Variant:
        """Return a contender computed from its method's merge at scale 1; equal up to rounding."""
        if not contender.is_merge or (contender.name == PLAIN and len(contender.parameters) == 1):
            return self.exact(contender)
        whole = contender.at(1.0)
        document = {
            "method": PLAIN,
            "base": self.paths[self.base_name],
            "models": [{"path": whole.label}],
            "parameters": {"scale": contender.scale},
        }
        return self.variant(document, {**self.opened, whole.label: self._at_one(whole)})

    def _at_one(self, contender: Contender) -> Checkpoint:
        if (found := self._kept.pop(contender.label, None)) is None:
            document = {**self.document(contender), "output": {"dtype": "float32"}}
            merged = StateDict(self.variant(document).weights(), contender.label)
            size = sum(merged.spec(name).nbytes for name in merged.names())
            while self._kept and (len(self._kept) + 1) * size > self.memory:
                del self._kept[next(iter(self._kept))]
            found = merged
        self._kept[contender.label] = found  # the most recently used is last
        return found

    def variant(self, document: Mapping[str, Any], opened: Mapping[str, Checkpoint] | None = None) -> Variant:
        """Return a planned recipe."""
        merge = recipes.prepare(recipes.load(dict(document)), open=(opened or self.opened).__getitem__)
        return Variant({}, document, merge)


def _path(model: Reference, name: str) -> str:
    """Return a reference to a model that works in a recipe anywhere: an absolute path or hub id; in memory, its
    name.
    """
    if not isinstance(model, (str, os.PathLike)):
        return name
    return "+".join(
        os.path.abspath(os.path.expanduser(part)) if exists(part) else part for part in parts(os.fspath(model))
    )
