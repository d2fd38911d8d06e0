"""MASS: one model over many experts that chooses, for each input, the experts to merge and the head to answer with."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from merganser.routing.choices import Routing, choose
from merganser.routing.composition import Composition, applied
from merganser.routing.heads import HeadLike, Heads, HeadScore
from merganser.routing.layers import distinct_experts, leading_layers
from merganser.routing.models import Features, LibraryModel
from merganser.routing.predictions import Prediction
from merganser.routing.routers import DEFAULT, Normalize, ProjectionRouter, Router, RoutingSource, check_router


@dataclass(frozen=True)
class Settings:
    """How experts are chosen.

    Attributes:
        threshold: η, the weight from which an expert is chosen.
        top: K, the largest number of experts chosen for a sample.
        per_batch: Whether a whole batch gets one set of experts and one head.
        probes: With `per_batch`, the number of samples at the start of the batch that choose the set; all by default.
        score: How answers of different heads are compared.
    """

    threshold: float = 0.2
    top: int = 3
    per_batch: bool = False
    probes: int | None = None
    score: HeadScore = "logit"


class AdaptiveModel(LibraryModel):
    """A model that merges, for every input, the experts that fit it (MASS).

    Once: leave out experts whose task vector has a cosine above `redundancy` (ε) with an accepted one, and merge the
    others by TSV-Merge. For every batch: run the fixed merge up to the router's layers; let the router weigh the
    experts there; take Ω, the at most `top` experts with a weight of at least `threshold`, or the best one; merge Ω
    by TSV-Merge; run θ₀ + Δ_Ω for all samples with this set; answer with the best (task, class) among the heads in Ω.

    A call swaps tensors, sets hooks and uses evaluation mode, and restores the module on exit. Calls from several
    threads wait for each other. See `LibraryModel` for its state dict, copies and moves.

    Args:
        module: The network. It must hold the base's weights, unless `load_base` is set.
        library: The experts.
        heads: The classification head of every expert, by its name. Without heads, a call returns the module's output.
        layer: The linear layer or convolution at which to route, or several of them, which vote together. By default
            the first half of those that experts changed; `score_layers` compares single layers.
        router: A router of your own, which replaces `layer`, `source` and `normalize`.
        source: The model of the first pass: the `"fixed"` merge (default) or the `"base"`.
        normalize: How residuals become weights: the softmax of their z-scores over the experts (`"zscore"`, default),
            or of the residuals themselves (`"softmax"`, the thesis), which needs a single layer with large inputs.
        threshold: η, the weight from which an expert is chosen.
        top: K, the largest number of experts chosen for a sample.
        per_batch: Whether a whole batch gets one set of experts and one head.
        probes: With `per_batch`, the number of samples at the start of a batch that choose the set; all by default.
        score: How answers of different heads are compared: `"logit"`, `"probability"` or `"posterior"`.
        redundancy: ε, the cosine above which an expert is left out of the fixed merge; `None` keeps all.
        pooling: How the tokens of a layer's input become one vector: `"mean"`, `"first"` or `"last"`.
        features: Turns the module's output and inputs into what the heads read, shape (samples, width). Needed
            unless the output itself has this shape.
        merge: Parameters of the method `tsv` for both merges; `{"orthogonalize": "none"}` is the plain sum of the
            thesis' algorithm.
        cache_bytes: Size of the cache of merged sets; twice the module by default.
        load_base: Load the library's base into the module first.

    Raises:
        InputError: If heads, layers or the router do not fit the library or the module.

    Example:
        >>> model = mg.routing.AdaptiveModel(encoder, library, heads, top=2)
        >>> answer = model(images)
        >>> answer.tasks, answer.classes
    """

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        heads: Mapping[str, HeadLike] | None = None,
        *,
        layer: str | Sequence[str] | None = None,
        router: Router | None = None,
        source: RoutingSource | None = None,
        normalize: Normalize | None = None,
        threshold: float = 0.2,
        top: int = 3,
        per_batch: bool = False,
        probes: int | None = None,
        score: HeadScore = "logit",
        redundancy: float | None = 0.3,
        pooling: Pooling = "mean",
        features: Features | None = None,
        merge: Mapping[str, Any] | None = None,
        cache_bytes: int | None = None,
        load_base: bool = False,
    ) -> None:
        first_pass: RoutingSource = "fixed" if source is None else source
        weighing: Normalize = DEFAULT if normalize is None else normalize
        one_of("source", first_pass, RoutingSource)
        one_of("normalize", weighing, Normalize)
        one_of("pooling", pooling, Pooling)
        for name, given in (("layer", layer), ("source", source), ("normalize", normalize)):
            if router is not None and given is not None:
                raise InputError(f"{name} {given!r}: the router has its own; pass either a router or {name}")
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
        return check_router(router, self.library, matrix_layers(self.module))

    def with_settings(self, **changes: Any) -> AdaptiveModel:
        """Return the same model (module, router, cache) with other `Settings`."""
        return self._with(settings=_checked(replace(self.settings, **changes)))

    def with_router(self, router: Router) -> AdaptiveModel:
        """Return the same model (module, settings, cache) with another router."""
        return self._with(router=self._fitting(router))

    def with_heads(self, heads: Mapping[str, HeadLike]) -> AdaptiveModel:
        """Return the same model with other heads."""
        return self._with(heads=Heads(heads, self.library.experts))

    def with_cache(self, cache_bytes: int | None = None) -> AdaptiveModel:
        """Return the same model with an empty cache of its own."""
        capacity = 2 * _nbytes(self.module) if cache_bytes is None else cache_bytes
        return self._with(cache=CompositionCache(capacity))

    def with_accepted(self, experts: Sequence[str]) -> AdaptiveModel:
        """Return the same model with these experts in the fixed merge."""
        return self._with(accepted=self._known(experts), _fixed=None)

    def _with(self, **parts: Any) -> AdaptiveModel:
        """Return a model that shares all parts with this one except the given ones."""
        other = self.__class__.__new__(self.__class__)
        # Submodules and hooks are stored in dicts, which must be copied so that the two models stay independent.
        other.__dict__.update({k: copy(v) if isinstance(v, dict) else v for k, v in self.__dict__.items()})
        for name, part in parts.items():
            delattr(other, name)
            setattr(other, name, part)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptiveModel:
        memo[id(self._lock)] = threading.RLock()
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.router.tasks

    @torch.no_grad()
    def route(self, batch: Any) -> Routing:
        """Run the first pass alone and return which experts each sample gets."""
        inputs = Inputs.of(batch, self.module)
        return self.decide(self.weigh(inputs), inputs.size)

    @torch.no_grad()
    def weigh(self, batch: Any) -> Tensor:
        """Run the first pass alone and return the router's weights for every sample, or for every probe."""
        with self._lock, evaluating(self):
            return self.router.weights(self.first_pass(batch).inputs)

    @torch.no_grad()
    def forward(self, batch: Any, *, task: str | None = None, routing: Routing | None = None) -> Prediction:
        """Answer a batch.

        Args:
            batch: A tensor, a tuple of the module's positional arguments or a mapping of its keyword arguments.
            task: The task whose head answers; by default the best (task, class) of every sample wins.
            routing: The result of `route`, to skip the first pass.

        Returns:
            The prediction. Without heads, its `logits` are the module's output.

        Raises:
            InputError: If the batch does not fit the module, or `task` has no head.

        Example:
            >>> logits, tasks, sets, *_ = model(images)
        """
        if task is not None:
            self.asked(task)
        inputs = Inputs.of(batch, self.module)
        with self._lock, evaluating(self):
            rows = 0.0
            if routing is None:
                seen = self.first_pass(inputs)
                rows = seen.rows / self._probed(inputs.size)
                routing = self.decide(self.router.weights(seen.inputs), inputs.size)
            elif len(routing.sets) != inputs.size:
                raise InputError(f"a routing of {len(routing.sets)} samples for a batch of {inputs.size}")
            parts = []
            for tasks, index in routing.groups().items():
                part = inputs if len(index) == inputs.size else inputs.select(index)
                parts.append((index, self._run(tasks, part, int(rows * len(index)))))
            output, whole = gather(parts, inputs.size), self._library_order(routing)
            best = tuple(whole.tasks[place] for place in whole.weights.argmax(1).tolist())
            passed = Prediction(output, best, whole.sets, whole, output)
            return passed if self.heads is None else self.answer(inputs, passed, task)

    def _run(self, tasks: frozenset[str], part: Inputs, rows: int) -> Any:
        """Run the merge of a set. Weights that are read without a call of their layer become whole matrices."""
        with applied(self.module, self.composition(tasks, rows)) as read:
            output = part.run(self.module)
        if not read:
            return output
        self.composer.called -= read
        self.cache.clear()
        return self._run(tasks, part, rows)

    @torch.no_grad()
    def answer(
        self, batch: Any, passed: Prediction, task: str | None = None, *, score: HeadScore | None = None
    ) -> Prediction:
        """Answer a batch again from a finished pass, with this model's heads and another `score`."""
        heads = self.asked(task)
        features = self.features(passed.output, Inputs.of(batch, self.module))
        how, together = score or self.settings.score, self.settings.per_batch
        found = heads.predict(features, passed.routing, how, task=task, together=together)
        return found._replace(output=passed.output)

    @contextmanager
    def using(self, tasks: Iterable[str]) -> Iterator[nn.Module]:
        """Yield the module with the merge of `tasks` loaded, in evaluation mode, for example to call `generate`."""
        names = frozenset(self._known(tasks))
        # With this many rows whole matrices pay off; they are right for any use of the module.
        with self._lock, applied(self.module, self.composition(names, sys.maxsize)):
            yield self.module

    def _known(self, tasks: Iterable[str]) -> tuple[str, ...]:
        names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
        if not names:
            raise InputError("name at least one expert")
        for task in names:
            if task not in self.library:
                raise InputError(f"no expert {task!r} in the library{did_you_mean(task, self.library.experts)}")
        return names

    def first_pass(self, batch: Any, layers: Sequence[str] | None = None) -> Activations:
        """Return the pooled inputs of the router's layers (or of `layers`); only of the probes if there are any."""
        inputs = Inputs.of(batch, self.module)
        probed = self._probed(inputs.size)
        part = inputs if probed == inputs.size else inputs.select(torch.arange(probed))
        wanted = self.router.layers if layers is None else layers
        with self._lock:
            self.composer.follow()
            first = nullcontext() if self.router.source == "base" else applied(self.module, self.fixed)
            with first:
                return capture(self.module, part, wanted, self.pooling)

    @property
    def fixed(self) -> Composition:
        """The fixed merge as whole matrices, which every first pass uses."""
        version = self.composer.follow()
        if self._fixed is None or self._fixed[0] != version:
            made = self.composer.compose(frozenset(self.accepted)).materialized(self.composer.tensors)
            self._fixed = (version, made)
        return self._fixed[1]

    def prepare(self) -> None:
        """Compute the fixed merge now, so that the first request does not wait for it."""
        if self.router.source == "fixed":
            _ = self.fixed

    def composition(self, tasks: frozenset[str], rows: int) -> Composition:
        """Return the changes of a set, for about `rows` rows of input."""
        self.cache.follow(self.composer.follow())
        return self.cache.get(tasks, rows, self.composer.compose, self.composer.tensors)

    def decide(self, weights: Tensor, size: int | None = None) -> Routing:
        """Choose sets from router weights; `size` is that of the batch, where it exceeds the probes."""
        if not self.settings.per_batch:
            return self._choose(weights)
        # The mean of the weights' logarithms is, up to a constant, softmax of the mean residual.
        mean = weights.clamp(min=1e-30).log().mean(0, keepdim=True).softmax(dim=1)
        return self._choose(mean).repeated(len(weights) if size is None else size)

    def _choose(self, weights: Tensor) -> Routing:
        """Choose among tasks, the likeliest of each question with the weight of all tasks that ask it."""
        weights, tasks = weights.cpu(), self.router.tasks
        pooled = weights if self.heads is None else self.heads.pooled(weights, tasks)
        routing = choose(tasks, pooled, self.settings.threshold, self.settings.top)
        return replace(routing, weights=weights)

    def _probed(self, size: int) -> int:
        probes = self.settings.probes
        return size if not self.settings.per_batch or probes is None else min(probes, size)

    def _library_order(self, routing: Routing) -> Routing:
        """Return the routing with a weight for every expert, 0 for those the router does not know."""
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
        raise InputError("probes need per_batch=True")
    one_of("score", settings.score, HeadScore)
    return settings


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.parameters())
