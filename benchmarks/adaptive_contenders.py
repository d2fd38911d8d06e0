"""Input-adaptive models and static merges, asked in one way: the same choice of settings and heads for all of them.

A contender has three settings. A pass of one gives the features of every sentence and, if the model chooses among
tasks, weights of them; then heads are compared in every way of `RULES` that applies. Passes that variants of MASS have
in common run once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.adaptive_setting import Data, Labelled, Setting, same_question
from merganser.modules.activations import capture
from merganser.modules.inputs import Inputs
from merganser.routing import AdaptiveModel, Prediction
from merganser.routing.baselines import Baseline, Smile, Static, TwinMerging, WeMoE
from merganser.routing.choices import Routing, choose
from merganser.routing.composition import applied
from merganser.routing.layers import leading_layers
from merganser.routing.routers import CalibratedRouter, ProjectionRouter, Router, RoutingSource

#: The head of the task with the largest weight, or the best (task, class) of all heads (for MASS: those of the set) by
#: logit, by log-probability within the head, or by the posterior of the answer (see `Heads.predict`).
Rule = Literal["vote", "logit", "probability", "posterior"]
RULES: tuple[Rule, ...] = ("vote", "logit", "probability", "posterior")
Model = AdaptiveModel | Baseline


@dataclass(frozen=True)
class Contender:
    """A method, and how it is built with each of its settings; those that are trained see the support sentences."""

    name: str
    settings: Mapping[str, Callable[[Setting], Model]]
    #: No rival of the others: it knows what they do not.
    limit: bool = False


def mass(name: str, router: Callable[[Setting], Router]) -> dict[str, Callable[[Setting], Model]]:
    """MASS with a router, which is built once for all three settings."""

    def build(setting: Setting) -> AdaptiveModel:
        model = setting.model(router=router(setting))
        model.prepare()
        return model

    def tuned(**settings: Any) -> Callable[[Setting], Model]:
        return lambda setting: setting.once(name, lambda: build(setting)).with_settings(**settings)

    return {
        "K = 1": tuned(top=1),
        "K = 2, η = 0.2": tuned(top=2, threshold=0.2),
        "K = 2, η = 0.3": tuned(top=2, threshold=0.3),
    }


def projection(source: RoutingSource) -> Callable[[Setting], ProjectionRouter]:
    return lambda setting: ProjectionRouter.of(setting.library, routing_layers(setting), source, "zscore")


def calibrated(sentences: Callable[[Data], Mapping[str, list[Inputs]]]) -> Callable[[Setting], Router]:
    """The router that reads the base, calibrated on sentences of every task."""
    return lambda setting: calibrate(projection("base")(setting), setting.encoder, sentences(setting.data))


def calibrate(router: ProjectionRouter, module: nn.Module, sentences: Mapping[str, list[Inputs]]) -> Router:
    seen = {task: [capture(module, x, router.layers).inputs for x in parts] for task, parts in sentences.items()}
    support = {
        task: {layer: torch.cat([inputs[layer] for inputs in parts]) for layer in router.layers}
        for task, parts in seen.items()
    }
    return CalibratedRouter.fit(router, support)


def routing_layers(setting: Setting) -> list[str]:
    return leading_layers(setting.library, setting.encoder, 1.0)


def twin(scale: float) -> Callable[[Setting], Model]:
    """The router is calibrated as that of MASS, but reads the shared expert."""

    def build(setting: Setting) -> Model:
        shared = setting.baseline(Static, method="task_arithmetic", scale=scale)
        with applied(shared.module, shared.composition):
            router = calibrate(projection("base")(setting), shared.module, setting.data.support)
        return setting.baseline(TwinMerging, router=router, scale=scale)

    return build


def wemoe(steps: int, learning_rate: float) -> Callable[[Setting], Model]:
    return lambda s: s.baseline(WeMoE).fit(s.data.support, steps=steps, learning_rate=learning_rate)


def smile(top: int, gate_rank: int) -> Callable[[Setting], Model]:
    return lambda setting: setting.baseline(Smile, top=top, gate_rank=gate_rank)


def static(method: Literal["tsv", "task_arithmetic"], scale: float) -> Callable[[Setting], Model]:
    return lambda setting: setting.baseline(Static, method=method, scale=scale)


FIXED, BASE, CALIBRATED = "MASS", "MASS, routed from the base", "MASS, calibrated router"
LIMIT = "MASS, calibrated on ten times as many"
CONTENDERS = (
    Contender(FIXED, mass(FIXED, projection("fixed"))),
    Contender(BASE, mass(BASE, projection("base"))),
    Contender(CALIBRATED, mass(CALIBRATED, calibrated(lambda data: data.support))),
    Contender(LIMIT, mass(LIMIT, calibrated(lambda data: data.training())), limit=True),
    Contender("SMILE", {f"top {t}, gates of rank {r}": smile(t, r) for t, r in ((1, 16), (1, 4), (2, 16))}),
    Contender("Arrow", {f"top {t}": smile(t, 1) for t in (1, 2, 4)}),
    Contender("Twin-Merging", {f"λ = {scale}": twin(scale) for scale in (0.2, 0.3, 0.45)}),
    Contender("TSV-M", {f"α = {scale}": static("tsv", scale) for scale in (1.0, 1.4, 2.0)}),
    Contender("task arithmetic", {f"α = {scale}": static("task_arithmetic", scale) for scale in (0.2, 0.3, 0.45)}),
    Contender("WeMoE", {f"{n} steps, rate {r:g}": wemoe(n, r) for n, r in ((10, 1e-2), (20, 1e-2), (20, 1e-3))}),
)


@dataclass(frozen=True)
class Pass:
    """What a model made of the sentences of one task: answers by rule, and with the true task's head."""

    answers: Mapping[str, list[Prediction]]
    told: list[Prediction]


def run(setting: Setting, model: Model, parts: Labelled, task: str) -> Pass:
    """Answer labelled batches in every way that applies."""
    found: dict[str, list[Prediction]] = {}
    told = []
    for x, _ in parts:
        read, routing = _features(setting, model, x)
        assert model.heads is not None
        for rule, chosen in _choices(routing, _anything(model, x)).items():
            found.setdefault(rule, []).append(model.heads.predict(read, chosen, "logit" if rule == "vote" else rule))
        told.append(model.heads.predict(read, _anything(model, x), task=task))
    return Pass(found, told)


def _features(setting: Setting, model: Model, x: Inputs) -> tuple[Tensor, Routing | None]:
    """What the heads read, and how the model weighed the tasks, if it did."""
    if isinstance(model, AdaptiveModel):
        return _adaptive_features(setting, model, x)
    output, votes = model.run(x)
    read = model.features(output, x)
    if votes is None:
        return read, None
    tasks = model.library.experts
    return read, choose(tasks, votes.detach().cpu(), threshold=0.0, top=len(tasks))


def _adaptive_features(setting: Setting, model: AdaptiveModel, x: Inputs) -> tuple[Tensor, Routing]:
    """The same for MASS: one first pass per source, and one second pass per set, for all its variants."""
    source = model.router.source
    layers = routing_layers(setting)
    inputs = setting.once(("first pass", source, id(x)), lambda: model.first_pass(x, layers).inputs)
    routing = model.decide(model.router.weights(inputs), x.size)
    known: dict[tuple[int, frozenset[str]], Tensor] = setting.once(("second pass", id(x)), dict)
    if missing := [place for place in enumerate(routing.sets) if place not in known]:
        rows = torch.tensor([row for row, _ in missing])
        part, sets = x.select(rows), tuple(chosen for _, chosen in missing)
        routed = Routing(routing.tasks, routing.weights[rows], sets, routing.fallback[rows])
        read = model.features(model(part, routing=routed).output, part)
        known.update(zip(missing, read, strict=True))
    return torch.stack([known[place] for place in enumerate(routing.sets)]), routing


def _anything(model: Model, x: Inputs) -> Routing:
    tasks = model.library.experts
    return choose(tasks, torch.full((x.size, len(tasks)), 1 / len(tasks)), threshold=0.0, top=len(tasks))


def _choices(routing: Routing | None, anything: Routing) -> dict[Rule, Routing]:
    """The routing that each rule asks for: one task, or those of the set; for a static merge, all tasks are alike."""
    if routing is None:
        return {rule: anything for rule in RULES if rule != "vote"}
    best = choose(routing.tasks, routing.weights, threshold=0.0, top=1)
    return {rule: best if rule == "vote" else routing for rule in RULES}


def marks(predictions: list[Prediction], parts: Labelled, task: str, rule: Literal["label", "pair"]) -> Tensor:
    """Whether each answer is right: its label (polarity tasks share theirs), or task and label."""
    found = []
    for prediction, (_, labels) in zip(predictions, parts, strict=True):
        for own, label, true in zip(prediction.tasks, prediction.classes.tolist(), labels.tolist(), strict=True):
            found.append(label == true and (own == task if rule == "pair" else same_question(own, task)))
    return torch.tensor(found)
