"""Fitness: a candidate is merged into a live module in memory, asked its items, and overwritten by the next.

The endpoints stay resident; a trial computes only the tensors whose method or parameters changed since the last one, by
the engine's own arithmetic, so a recipe of the same values reproduces the weights bit for bit.
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
from merganser.engine.compute import NARROW, Arithmetic
from merganser.engine.execute import execute
from merganser.engine.modules import ModuleNames, RenamingSink
from merganser.engine.plan import Output, Plan
from merganser.errors import InputError
from merganser.evaluate.questions import SCORE, Asked, Examiner
from merganser.evolve.answercache import AnswerCache, answer_keys
from merganser.evolve.space import Space
from merganser.evolve.workers import Candidate
from merganser.methods.registry import lookup

#: The label of the base, unless a model has it.
BASE = "base"


def resident(checkpoint: Checkpoint) -> StateDict:
    """All tensors of a checkpoint in memory, tied ones once; looked at once for what no merge should spread."""
    tensors = {name: checkpoint.read(name).clone() for name in checkpoint.names()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise InputError(
                f"{checkpoint.label}: tensor {name!r} contains NaN or infinite values; use a sound checkpoint"
            )
    tied = {alias: tensors[name] for alias, name in checkpoint.aliases().items()}
    copy = StateDict(tensors | tied, checkpoint.label)
    copy.directory = checkpoint.directory
    return copy


def endpoint_document(template: Mapping[str, Any], labels: Sequence[str], endpoint: str) -> dict[str, Any]:
    """Return the recipe of an endpoint, or of the base: a merge of which every tensor is that model's own."""
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
    """A module that becomes one candidate after the other.

    `template` is a native recipe without the values under search, its models in the order of `labels`.
    """

    def __init__(self, module: nn.Module, template: Mapping[str, Any], labels: Sequence[str], space: Space) -> None:
        self.module = module
        self.template = template
        self.labels = list(labels)
        self.space = space
        self._open: dict[str, Checkpoint] = {}
        self._loaded: dict[str, Any] = {}
        self._same: dict[tuple[Any, ...], bool] = {}
        self._first: Checkpoint | None = None
        self._candidate: Candidate | None = None
        state = module.state_dict(keep_vars=True)
        self._names = ModuleNames(state, getattr(module, "base_model_prefix", ""))
        self._sink = RenamingSink(module, self._names)

    def load(self, candidate: Candidate) -> nn.Module:
        """The module with the candidate's weights (an endpoint's own, for a label)."""
        if self._candidate is not None and candidate == self._candidate:
            return self.module
        self._candidate = None
        merge = recipes.prepare(recipes.load(self.document(candidate)), open=self._resident)
        plan, sources = merge.plan, merge.sources
        self._names.check(plan)
        if nested := [model.label for model in plan.models if model.plan is not None]:
            raise InputError(f"{nested[0]}: a nested recipe cannot be evolved; merge it first and name the result")
        if self._first is None:
            self._first = sources[0]
        marks = self._marks(plan, sources)
        changed = tuple(o for o in plan.outputs if o.name in marks and self._loaded.get(o.name) != marks[o.name])
        if changed:
            self._loaded = {n: m for n, m in self._loaded.items() if n not in {o.name for o in changed}}
            # The residents are known to be finite: only what may overflow is looked at again, trial by trial.
            settings = Arithmetic(allow_nan=not any(o.spec.element.name in NARROW for o in changed))
            with torch.no_grad():
                execute(merge.only(changed), self._sink, settings=settings)
            self._loaded = marks
        self._candidate = candidate
        return self.module

    def document(self, candidate: Candidate) -> dict[str, Any]:
        """The recipe of a candidate. An endpoint's is the same merge with every tensor taken from it alone, so that
        the base's names and the vocabulary of the output hold for it too."""
        if isinstance(candidate, str):
            return endpoint_document(self.template, self.labels, candidate)
        return self.space.recipe(self.template, self.labels, candidate)

    def _resident(self, reference: str) -> Checkpoint:
        if reference not in self._open:
            self._open[reference] = resident(open_checkpoint(reference))
        return self._open[reference]

    def _marks(self, plan: Plan, sources: Sequence[Checkpoint]) -> dict[str, Any]:
        """Equal marks, equal tensors: how an output is made, or only that it is the base's tensor of its name."""
        on_deltas = {method: lookup(method).base == "required" for method in {o.method for o in plan.outputs}}
        shared = {id(output.parameters): output.parameters for output in plan.outputs}
        told = {key: json.dumps(dict(given), sort_keys=True, default=str) for key, given in shared.items()}
        return {
            output.name: self._mark(plan, output, sources, on_deltas[output.method], told[id(output.parameters)])
            for output in plan.outputs
            if output.name in self._names
        }

    def _mark(
        self, plan: Plan, output: Output, sources: Sequence[Checkpoint], on_deltas: bool, parameters: str
    ) -> tuple[Any, ...]:
        if output.copies or on_deltas:
            parts = [*output.inputs, *([output.base] if output.base else [])]
            places = [(str(plan.models[s.model].path), s.name) for s in parts]
            if self._untouched(output.name, places, [sources[s.model] for s in parts]):
                return ("untouched", output.spec.dtype)
        inputs = [(str(plan.models[s.model].path), s.name) for s in output.inputs]
        base = output.base and (str(plan.models[output.base.model].path), output.base.name)
        return (output.method, inputs, base, parameters, plan.seed, output.spec.dtype)

    def _untouched(self, output: str, places: Sequence[tuple[str, str]], sources: Sequence[Checkpoint]) -> bool:
        """Whether all these tensors equal the base's (the first model's, without a base) of the output's name: a model
        without a head gives its embedding for it, which is another tensor."""
        first = self._first
        if first is None or output not in first:
            return False
        key = (output, *places)
        if key not in self._same:
            self._same[key] = all(
                torch.equal(source.read(name), first.read(output))
                for (_, name), source in zip(places, sources, strict=True)
            )
        return self._same[key]


@dataclass
class MergedModels:
    """The evaluator of a study over merges: picklable; each process builds its module and endpoints on first use."""

    module: Callable[[], nn.Module]
    template: Mapping[str, Any]
    labels: tuple[str, ...]
    space: Space
    examiners: Mapping[str, Examiner]
    answers: str | None = None
    _live: LiveMerge | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None}

    @property
    def live(self) -> LiveMerge:
        if self._live is None:
            self._live = LiveMerge(self.module().eval(), self.template, self.labels, self.space)
        return self._live

    def __call__(self, candidate: Candidate, items: Mapping[str, Sequence[int]]) -> dict[str, Sequence[float]]:
        answers: dict[str, Sequence[float]] = {}
        for task, chosen in items.items():
            for measure, values in self._ask(candidate, self.examiners[task], chosen).items():
                answers[task if measure == SCORE else f"{task}.{measure}"] = values
        return answers

    def _ask(self, candidate: Candidate, examiner: Examiner, items: Sequence[int]) -> Mapping[str, Sequence[float]]:
        """Ask a candidate; an endpoint only what `answers` does not hold."""

        def examine(chosen: Sequence[int]) -> Mapping[str, Sequence[float]]:
            model = self.live.load(candidate)
            with torch.inference_mode():
                return examiner(model, chosen)

        if self.answers is None or not isinstance(candidate, str) or not isinstance(examiner, Asked):
            return examine(items)
        keys = answer_keys(examiner, self._weights(candidate), items)
        return AnswerCache(self.answers).ask(keys, items, examine)

    def _weights(self, endpoint: str) -> str:
        """What an endpoint's weights are known by: its bytes, and those of the base, whose names it takes; with a
        change of the output, which may depend on all models, those of all."""
        document = endpoint_document(self.template, self.labels, endpoint)
        paths = [document["overrides"][0]["model"], document.get("base", "")]
        if "output" in document:
            paths += [model["path"] for model in document["models"]]
        hashes = [content_hash(open_checkpoint(path)) for path in paths if path]
        return json.dumps([hashes, document.get("output"), str(self.module)], default=str)
