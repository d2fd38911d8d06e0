"""Evaluate candidates: each is merged into a live module in memory and asked its items.

The endpoints stay open; plain files are memory maps, which all workers of a machine share. A trial computes only the
tensors whose method or parameters changed since the last one, with the engine's own arithmetic, so that a recipe with
the same values reproduces the weights bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from merganser import recipes
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.hashing import content_hash
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.live import LiveModule
from merganser.engine.modules import ModuleTensors
from merganser.errors import InputError
from merganser.evaluate.fingerprints import hash_module
from merganser.evaluate.loaders import Loader
from merganser.evaluate.questions import Asked, Examiner
from merganser.evolve.cache import AnswerCache, answer_keys
from merganser.evolve.design import BASE
from merganser.evolve.measures import name_measure
from merganser.evolve.metering import CostMeter
from merganser.evolve.quantization import Quantization, QuantizedCopy
from merganser.evolve.space import Space
from merganser.evolve.workers import Proposal


def hold_open(checkpoint: Checkpoint) -> StateDict:
    """Read all tensors of a checkpoint once, tied ones too, and refuse values that are not finite.

    Tensors of memory-mapped files are not copied; those that a view computes are kept in memory.
    """
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise InputError(
                f"{checkpoint.label}: tensor {name!r} contains NaN or infinite values; use a sound checkpoint"
            )
    tied = {alias: tensors[name] for alias, name in checkpoint.aliases().items()}
    held = StateDict(tensors | tied, checkpoint.label)
    held.directory = checkpoint.directory
    return held


def endpoint_document(template: Mapping[str, Any], labels: Sequence[str], endpoint: str) -> dict[str, Any]:
    """Return the recipe of an endpoint, or of the base: a merge in which every tensor is that model's."""
    paths = [model["path"] for model in template["models"]]
    if endpoint in labels:
        path = paths[list(labels).index(endpoint)]
    elif endpoint == BASE and "base" in template:
        path = template["base"]
        paths = list(dict.fromkeys([*paths, path]))
    else:
        raise InputError(f"no endpoint {endpoint!r}; there are {', '.join(labels)}")
    kept = {key: template[key] for key in ("base", "output", "seed") if key in template}
    return {
        "method": "passthrough",
        **kept,
        "models": [{"path": path} for path in paths],
        "overrides": [{"match": "*", "model": path}],
    }


class LiveMerge:
    """A module that is loaded with one candidate after the other.

    `template` is a native recipe without the values under search, its models in the order of `space.models`.
    """

    def __init__(self, module: nn.Module, template: Mapping[str, Any], space: Space) -> None:
        self.module = module
        self.template = template
        self.space = space
        self._open: dict[str, Checkpoint] = {}
        self._candidate: Proposal | None = None
        self._live = LiveModule(module, finite=True)  # `hold_open` has checked every source
        self._names = ModuleTensors(module)
        self._copy: QuantizedCopy | None = None

    def load(self, candidate: Proposal, quantization: Quantization | None = None) -> nn.Module:
        """Load the weights of a candidate into the module (an endpoint's own, for a label) and return it, or its
        quantised copy.
        """
        if self._candidate is None or candidate != self._candidate:
            self._candidate = None
            changed = self._live.load(recipes.prepare(recipes.load(self.document(candidate)), open=self._hold_endpoint))
            if self._copy is not None:
                self._copy.mark(str(self._names.find(output.name)) for output in changed)
            self._candidate = candidate
        if quantization is None:
            return self.module
        if self._copy is None:
            self._copy = QuantizedCopy(self.module, quantization)
        return self._copy.refresh()

    def open_endpoints(self) -> None:
        """Open the base and the models, which the first load would do otherwise."""
        paths = [model["path"] for model in self.template["models"]]
        for path in dict.fromkeys([*paths, *([self.template["base"]] if "base" in self.template else [])]):
            self._hold_endpoint(path)

    def document(self, candidate: Proposal) -> dict[str, Any]:
        """Return the recipe of a candidate. For an endpoint it is the same merge with every tensor from that model,
        so that the base's names and the output's vocabulary apply to it too.
        """
        if isinstance(candidate, str):
            return endpoint_document(self.template, self.space.models, candidate)
        return self.space.recipe(self.template, candidate)

    def _hold_endpoint(self, reference: str) -> Checkpoint:
        if reference not in self._open:
            self._open[reference] = hold_open(open_checkpoint(reference))
        return self._open[reference]


@dataclass
class MergedModels:
    """The evaluator of a study over merges. Picklable: each process builds its module and endpoints on first use."""

    module: Callable[[], nn.Module]
    template: Mapping[str, Any]
    space: Space
    examiners: Mapping[str, Examiner]
    answers: str | None = None
    quantize: Quantization | None = None
    _live: LiveMerge | None = field(default=None, init=False, repr=False, compare=False)
    _meter: CostMeter = field(default_factory=CostMeter, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None, "_meter": CostMeter()}

    def take_costs(self) -> dict[str, float]:
        """Return what was spent on loading, merging and asking since this was last called."""
        return self._meter.take()

    @property
    def live(self) -> LiveMerge:
        if self._live is None:
            with self._meter.timed("loading"):
                live = LiveMerge(self.module().eval(), self.template, self.space)
                live.open_endpoints()
            self._live = live
        return self._live

    def __call__(self, candidate: Proposal, items: Mapping[str, Sequence[int]]) -> dict[str, Sequence[float]]:
        return self._answer(candidate, items, self.quantize)

    def ask_exactly(self, candidate: Proposal, items: Mapping[str, Sequence[int]]) -> dict[str, Sequence[float]]:
        """Return answers in full precision, also if candidates are quantised."""
        return self._answer(candidate, items, None)

    def _answer(
        self, candidate: Proposal, items: Mapping[str, Sequence[int]], quantize: Quantization | None
    ) -> dict[str, Sequence[float]]:
        answers: dict[str, Sequence[float]] = {}
        for task, chosen in items.items():
            for measure, values in self._ask(candidate, self.examiners[task], chosen, quantize).items():
                answers[name_measure(task, measure)] = values
        return answers

    def _ask(
        self, candidate: Proposal, examiner: Examiner, items: Sequence[int], quantize: Quantization | None
    ) -> Mapping[str, Sequence[float]]:
        """Ask a candidate; for an endpoint, ask only what `answers` does not have."""

        def examine(chosen: Sequence[int]) -> Mapping[str, Sequence[float]]:
            live = self.live
            with self._meter.timed("merging"):
                model = live.load(candidate, quantize)
            with self._meter.asking(), torch.inference_mode():
                return examiner(model, chosen)

        if self.answers is None or not isinstance(candidate, str) or not isinstance(examiner, Asked):
            return examine(items)
        keys = answer_keys(examiner, self._weights(candidate, quantize), items)
        return AnswerCache(self.answers).ask(keys, items, examine)

    def _weights(self, endpoint: str, quantize: Quantization | None) -> str:
        """Return the identity of an endpoint: its bytes, those of the base, whose names it uses, and the module that
        they are loaded into. If the output changes, which may depend on all models, all of them count.
        """
        document = endpoint_document(self.template, self.space.models, endpoint)
        paths = [document["overrides"][0]["model"], document.get("base", "")]
        if "output" in document:
            paths += [model["path"] for model in document["models"]]
        hashes = [content_hash(open_checkpoint(path)) for path in paths if path]
        form = [] if quantize is None else [quantize.form]
        module = hash_module(self.module) if isinstance(self.module, Loader) else {}
        return json.dumps([hashes, document.get("output"), str(self.module), module, *form], default=str)
