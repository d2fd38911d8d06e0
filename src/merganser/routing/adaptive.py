"""MASS: one model over many experts that finds, for each input, the experts to merge and the head to answer with."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from merganser.errors import InputError, did_you_mean, one_of
from merganser.library.library import Library
from merganser.modules.activations import Activations, Pooling, capture, layer_of, matrix_layers
from merganser.modules.inputs import Inputs, gather
from merganser.modules.moments import evaluating
from merganser.routing.caching import CompositionCache
from merganser.routing.composition import Composition, applied
from merganser.routing.heads import Head, Heads, Score
from merganser.routing.layers import distinct_experts, leading_layers
from merganser.routing.models import Features, LibraryModel
from merganser.routing.predictions import Prediction
from merganser.routing.routers import DEFAULT, Normalize, ProjectionRouter, Router, Routing, Source, checked, choose


@dataclass(frozen=True)
class Settings:
    """η, K, whether a whole batch gets one set and one head (the set found from the first `probes` samples), how heads
    are compared."""

    threshold: float = 0.2
    top: int = 3
    per_batch: bool = False
    probes: int | None = None
    score: Score = "logit"


class AdaptiveModel(LibraryModel):
    """Merges experts for every input (MASS).

    Fixed step: experts whose task vector has a cosine above `redundancy` (ε) with an accepted one are left out, the
    others are merged by TSV-Merge. Then for every batch: a first pass through the fixed merge up to `layer`; the
    router's weights there; Ω, the at most `top` tasks with weight ≥ `threshold`, or the best one; TSV-Merge of Ω; a
    second pass through θ₀ + Δ_Ω, samples of one set together; the best (task, class) among the heads in Ω.

    The module must hold the base's weights (or say `load_base=True`), and is otherwise left alone: nothing but hooks,
    swapped tensors and evaluation mode during a call. Calls from several threads wait for each other. It is a module
    itself: see `LibraryModel` for its state dict, copies and moves.

    `layer` names one or several linear modules or convolutions; without it the first half of those that experts changed
    vote together (`experts.layers` scores single ones). `source` ("fixed" or "base") is the model of the first pass,
    `normalize` says how residuals become weights: softmax of their z-scores over the tasks, or of themselves as in the
    thesis ("softmax"), which only a single layer with large inputs makes differ from task to task. `router` stands in
    the place of all three. `merge` are parameters of the method `tsv` for both steps (`{"orthogonalize": "none"}` is
    the plain sum of the thesis' algorithm box).
    Compositions of at most `cache_bytes` are kept for the next time (default: twice the module).
    """

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        heads: Mapping[str, Head] | None = None,
        *,
        layer: str | Sequence[str] | None = None,
        router: Router | None = None,
        source: Source | None = None,
        normalize: Normalize | None = None,
        threshold: float = 0.2,
        top: int = 3,
        per_batch: bool = False,
        probes: int | None = None,
        score: Score = "logit",
        redundancy: float | None = 0.3,
        pooling: Pooling = "mean",
        features: Features | None = None,
        merge: Mapping[str, Any] | None = None,
        cache_bytes: int | None = None,
        load_base: bool = False,
    ) -> None:
        first_pass: Source = "fixed" if source is None else source
        weighing: Normalize = DEFAULT if normalize is None else normalize
        one_of("source", first_pass, Source)
        one_of("normalize", weighing, Normalize)
        one_of("pooling", pooling, Pooling)
        for name, given in (("layer", layer), ("source", source), ("normalize", normalize)):
            if router is not None and given is not None:
                raise InputError(f"{name} {given!r}: the router given has its own; leave one of the two out")
        settings = _checked(Settings(threshold, top, per_batch, probes, score))
        super().__init__(module, library, heads, features, merge or {}, load_base)
        self.pooling: Pooling = pooling
        self.settings = settings
        if router is None:
            router = ProjectionRouter.of(library, self._layers(layer), first_pass, weighing)
        self.router = self._fitting(router)
        self.accepted = distinct_experts(library, redundancy)
        self.cache = CompositionCache(2 * _nbytes(module) if cache_bytes is None else cache_bytes)
        #: The fixed merge, and the version of the module it was made for.
        self._fixed: tuple[int, Composition] | None = None
        self._lock = threading.RLock()

    def _layers(self, layer: str | Sequence[str] | None) -> list[str]:
        if layer is None:
            return leading_layers(self.library, self.module)
        known = matrix_layers(self.module)
        return [layer_of(name, known) for name in ([layer] if isinstance(layer, str) else layer)]

    def _fitting(self, router: Router) -> Router:
        return checked(router, self.library, matrix_layers(self.module))

    def with_settings(self, **changes: Any) -> AdaptiveModel:
        """The same model (module, router, cache) under other `Settings`."""
        return self._with(settings=_checked(replace(self.settings, **changes)))

    def with_router(self, router: Router) -> AdaptiveModel:
        """The same model (module, settings, cache) with another router."""
        return self._with(router=self._fitting(router))

    def with_heads(self, heads: Mapping[str, Head]) -> AdaptiveModel:
        """The same model with other heads."""
        return self._with(heads=Heads(heads, self.library.experts))

    def with_cache(self, cache_bytes: int | None = None) -> AdaptiveModel:
        """The same model with an empty cache of its own."""
        capacity = 2 * _nbytes(self.module) if cache_bytes is None else cache_bytes
        return self._with(cache=CompositionCache(capacity))

    def with_accepted(self, experts: Sequence[str]) -> AdaptiveModel:
        """The same model with these experts in the fixed merge."""
        return self._with(accepted=self._known(experts), _fixed=None)

    def _with(self, **parts: Any) -> AdaptiveModel:
        """A model of the same parts but for these, which are its own."""
        other = self.__class__.__new__(self.__class__)
        # The tables of submodules and hooks are dicts: another part here must not become one there.
        other.__dict__.update({k: copy(v) if isinstance(v, dict) else v for k, v in self.__dict__.items()})
        for name, part in parts.items():
            delattr(other, name)
            setattr(other, name, part)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptiveModel:
        memo[id(self._lock)] = threading.RLock()
        return super().__deepcopy__(memo)

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.router.tasks

    @torch.no_grad()
    def route(self, batch: Any) -> Routing:
        """The first pass alone: which experts each sample gets."""
        inputs = Inputs.of(batch, self.module)
        with self._lock, evaluating(self):
            return self._decide(self.first_pass(inputs), inputs.size)

    @torch.no_grad()
    def forward(self, batch: Any, *, task: str | None = None, routing: Routing | None = None) -> Prediction:
        """Answer a batch.

        Args:
            batch: A tensor, a tuple of the module's positional arguments or a mapping of its keyword arguments.
            task: Whose head is to answer; by default the best (task, class) of every sample wins.
            routing: What `route` decided, if it is known already.

        Returns:
            The prediction; of a model without heads the module's output is its `logits`.

        Raises:
            InputError: If the batch does not fit the module, or a task is named that has no head.

        Example:
            >>> logits, tasks, sets, *_ = model(images)
        """
        if task is not None:
            self.asked(task)
        inputs = Inputs.of(batch, self.module)
        with self._lock, evaluating(self):
            seen = None if routing else self.first_pass(inputs)
            decided = routing or self._decide(seen, inputs.size)
            if len(decided.sets) != inputs.size:
                raise InputError(f"a routing of {len(decided.sets)} samples for a batch of {inputs.size}")
            rows = seen.rows / self._probed(inputs.size) if seen else 0.0
            parts = []
            for tasks, index in decided.groups().items():
                part = inputs if len(index) == inputs.size else inputs.select(index)
                parts.append((index, self._run(tasks, part, int(rows * len(index)))))
            output, whole = gather(parts, inputs.size), self._library_order(decided)
            best = tuple(whole.tasks[place] for place in whole.weights.argmax(1).tolist())
            passed = Prediction(output, best, whole.sets, whole, output)
            return passed if self.heads is None else self.answer(inputs, passed, task)

    def _run(self, tasks: frozenset[str], part: Inputs, rows: int) -> Any:
        """The output of a set. Weights that turn out to be read without a call are whole matrices from then on."""
        composition, _ = self.composition(tasks, rows)
        with applied(self.module, composition) as read:
            output = part.run(self.module)
        if not read:
            return output
        self.composer.called -= read
        self.cache.clear()
        return self._run(tasks, part, rows)

    @torch.no_grad()
    def answer(
        self, batch: Any, passed: Prediction, task: str | None = None, *, score: Score | None = None
    ) -> Prediction:
        """Answer a batch anew from a pass that was made, with this model's heads; `score` instead of the settings'."""
        heads = self.asked(task)
        features = self.features(passed.output, Inputs.of(batch, self.module))
        how, together = score or self.settings.score, self.settings.per_batch
        found = heads.predict(features, passed.routing, how, task=task, together=together)
        return found._replace(output=passed.output)

    @contextmanager
    def using(self, tasks: Iterable[str]) -> Iterator[nn.Module]:
        """The module with the merge of `tasks` in force, as whole matrices and in evaluation mode: for whatever else
        it can do, such as `generate`."""
        names = frozenset(self._known(tasks))
        # So many rows pay for whole matrices, which are right whatever is done with the module.
        with self._lock, applied(self.module, self.composition(names, sys.maxsize)[0]):
            yield self.module

    def _known(self, tasks: Iterable[str]) -> tuple[str, ...]:
        names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
        if not names:
            raise InputError("name at least one expert")
        for task in names:
            if task not in self.library:
                raise InputError(f"no expert {task!r} in the library{did_you_mean(task, self.library.experts)}")
        return names

    def first_pass(self, batch: Any, layers: Sequence[str] | None = None, stop: bool = True) -> Activations:
        """The pooled inputs of the router's layers (or of `layers`), of the probes if the batch is routed as one."""
        inputs = Inputs.of(batch, self.module)
        probed = self._probed(inputs.size)
        part = inputs if probed == inputs.size else inputs.select(torch.arange(probed))
        wanted = self.router.layers if layers is None else layers
        with self._lock:
            self.composer.follow()
            if self.router.source == "base":
                return capture(self.module, part, wanted, self.pooling, stop)
            with applied(self.module, self.fixed):
                return capture(self.module, part, wanted, self.pooling, stop)

    @property
    def fixed(self) -> Composition:
        """The fixed merge, as whole matrices: every first pass goes through it."""
        version = self.composer.follow()
        if self._fixed is None or self._fixed[0] != version:
            made = self.composer.compose(frozenset(self.accepted)).materialized(self.composer.tensors)
            self._fixed = (version, made)
        return self._fixed[1]

    def prepare(self) -> None:
        """Work out now what the first request would have to wait for."""
        if self.router.source == "fixed":
            _ = self.fixed

    def composition(self, tasks: frozenset[str], rows: int) -> tuple[Composition, int]:
        """The changes a set makes, for about `rows` rows, and the multiply-adds of getting them."""
        self.cache.follow(self.composer.follow())
        return self.cache.get(tasks, rows, self.composer.compose, self.composer.tensors)

    def decide(self, weights: Tensor, size: int | None = None) -> Routing:
        """Sets from router weights, under the settings. `size`: of the batch, where it is more than its probes."""
        if not self.settings.per_batch:
            return self._choose(weights)
        # The mean of the weights' logarithms is, up to a constant, softmax of the mean residual.
        mean = weights.clamp(min=1e-30).log().mean(0, keepdim=True).softmax(dim=1)
        return self._choose(mean).repeated(len(weights) if size is None else size)

    def _choose(self, weights: Tensor) -> Routing:
        return choose(self.router.tasks, weights.cpu(), self.settings.threshold, self.settings.top)

    def _decide(self, seen: Activations | None, size: int) -> Routing:
        assert seen is not None
        return self.decide(self.router.weights(seen.inputs), size)

    def _probed(self, size: int) -> int:
        probes = self.settings.probes
        return size if not self.settings.per_batch or probes is None else min(probes, size)

    def _library_order(self, routing: Routing) -> Routing:
        """The same with the weights of all experts, 0 for those the router does not know."""
        experts = self.library.experts
        if routing.tasks == experts:
            return routing
        weights = torch.zeros(len(routing.sets), len(experts), dtype=routing.weights.dtype)
        for column, task in enumerate(routing.tasks):
            weights[:, experts.index(task)] = routing.weights[:, column]
        return replace(routing, tasks=experts, weights=weights)


def _checked(settings: Settings) -> Settings:
    choose(("",), torch.ones(1, 1), settings.threshold, settings.top)
    if settings.probes is not None and settings.probes < 1:
        raise InputError(f"probes {settings.probes}: at least one sample must be looked at")
    if settings.probes is not None and not settings.per_batch:
        raise InputError("probes are for whole batches: say per_batch=True")
    one_of("score", settings.score, Score)
    return settings


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.parameters())
