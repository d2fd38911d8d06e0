"""Input-adaptive models and static merges, asked in one way: the same choice of settings and heads for all of them.

A contender has three settings. A pass of one gives the features of every sentence and, if the model chooses among
tasks, weights of them; then heads are compared in every way of `RULES` that applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.adaptive_scores import same_label
from benchmarks.adaptive_setting import Labelled, Setting
from merganser.modules.activations import capture
from merganser.modules.inputs import Inputs
from merganser.routing import AdaptiveModel, Prediction
from merganser.routing.baselines import Baseline, Smile, Static, TwinMerging, WeMoE
from merganser.routing.choices import Routing
from merganser.routing.composition import applied
from merganser.routing.layers import leading_layers
from merganser.routing.routers import MlpRouter, ProjectionRouter

#: The head of the task with the largest weight, or the best (task, class) of all heads (for MASS: those of the set) by
#: logit, by log-probability within the head, or by that with the log-weight of the task added.
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


def mass(source: Literal["fixed", "base"], **settings: Any) -> Callable[[Setting], Model]:
    def build(setting: Setting) -> Model:
        layers = leading_layers(setting.library, setting.encoder, 1.0)
        router = ProjectionRouter.of(setting.library, layers, source, "zscore")
        model = setting.model(router=router, **settings)
        model.prepare()
        return model

    return build


def trained(**settings: Any) -> Callable[[Setting], Model]:
    """MASS with a router that saw labelled training sentences of every task: about what any router could find."""

    def build(setting: Setting) -> Model:
        layer = leading_layers(setting.library, setting.encoder, 1.0)[-6]
        router = MlpRouter.fit(layer, read_inputs(setting.encoder, layer, setting.data.training), "base")
        model = setting.model(router=router, **settings)
        model.prepare()
        return model

    return build


def read_inputs(module: nn.Module, layer: str, sentences: Mapping[str, list[Inputs]]) -> dict[str, Tensor]:
    """Return the inputs of a layer for the sentences of every task."""
    return {
        task: torch.cat([capture(module, x, [layer]).inputs[layer] for x in parts]) for task, parts in sentences.items()
    }


def twin(scale: float) -> Callable[[Setting], Model]:
    """The router reads the first matrix of the last block, of the shared expert."""

    def build(setting: Setting) -> Model:
        shared = setting.baseline(Static, method="task_arithmetic", scale=scale)
        layer = leading_layers(setting.library, setting.encoder, 1.0)[-6]
        with applied(shared.module, shared.composition):
            support = read_inputs(shared.module, layer, setting.data.support)
        return setting.baseline(TwinMerging, router=MlpRouter.fit(layer, support), scale=scale)

    return build


def wemoe(steps: int, learning_rate: float) -> Callable[[Setting], Model]:
    return lambda s: s.baseline(WeMoE).fit(s.data.support, steps=steps, learning_rate=learning_rate)


def smile(top: int, gate_rank: int) -> Callable[[Setting], Model]:
    return lambda setting: setting.baseline(Smile, top=top, gate_rank=gate_rank)


def static(method: Literal["tsv", "task_arithmetic"], scale: float) -> Callable[[Setting], Model]:
    return lambda setting: setting.baseline(Static, method=method, scale=scale)


def routed(build: Callable[..., Callable[[Setting], Model]]) -> dict[str, Callable[[Setting], Model]]:
    return {
        "K = 1": build(top=1),
        "K = 2, η = 0.2": build(top=2, threshold=0.2),
        "K = 2, η = 0.3": build(top=2, threshold=0.3),
    }


CONTENDERS = (
    Contender("MASS", routed(partial(mass, "fixed"))),
    Contender("MASS, routed from the base", routed(partial(mass, "base"))),
    Contender("MASS, router trained on labels", routed(trained), limit=True),
    Contender("SMILE", {f"top {t}, gates of rank {r}": smile(t, r) for t, r in ((1, 16), (1, 4), (2, 16))}),
    Contender("Twin-Merging", {f"λ = {scale}": twin(scale) for scale in (0.2, 0.3, 0.45)}),
    Contender("WeMoE", {f"{n} steps, rate {r:g}": wemoe(n, r) for n, r in ((10, 1e-2), (20, 1e-2), (20, 1e-3))}),
    Contender("TSV-M", {f"α = {scale}": static("tsv", scale) for scale in (1.0, 1.4, 2.0)}),
    Contender("task arithmetic", {f"α = {scale}": static("task_arithmetic", scale) for scale in (0.2, 0.3, 0.45)}),
)


@dataclass(frozen=True)
class Pass:
    """What a model made of the sentences of one task: answers by rule, and with the true task's head."""

    answers: Mapping[str, list[Prediction]]
    told: list[Prediction]


def run(model: Model, parts: Labelled, task: str) -> Pass:
    """Answer labelled batches in every way that applies."""
    found: dict[str, list[Prediction]] = {}
    told = []
    for x, _ in parts:
        output, routing = _output(model, x)
        read = model.features(output, x)
        assert model.heads is not None
        for rule, chosen in _choices(routing, _anything(model, x)).items():
            found.setdefault(rule, []).append(model.heads.predict(read, chosen, "logit" if rule == "vote" else rule))
        told.append(model.heads.predict(read, _anything(model, x), task=task))
    return Pass(found, told)


def _output(model: Model, x: Inputs) -> tuple[Any, Routing | None]:
    if isinstance(model, AdaptiveModel):
        prediction = model(x)
        return prediction.output, prediction.routing
    output, votes = model.run(x)
    if votes is None:
        return output, None
    tasks = model.library.experts
    sets = (frozenset(tasks),) * x.size
    return output, Routing(tasks, votes.detach().cpu(), sets, torch.zeros(x.size, dtype=torch.bool))


def _anything(model: Model, x: Inputs) -> Routing:
    tasks = model.library.experts
    weights = torch.full((x.size, len(tasks)), 1 / len(tasks))
    return Routing(tasks, weights, (frozenset(tasks),) * x.size, torch.zeros(x.size, dtype=torch.bool))


def _choices(routing: Routing | None, anything: Routing) -> dict[Rule, Routing]:
    """The routing that each rule asks for: one task, or those of the set; a static merge has no weights to go by."""
    if routing is None:
        return {"logit": anything, "probability": anything}
    tasks = routing.tasks
    best = tuple(frozenset([tasks[index]]) for index in routing.weights.argmax(1).tolist())
    alone = Routing(tasks, routing.weights, best, routing.fallback)
    return {rule: alone if rule == "vote" else routing for rule in RULES}


def marks(predictions: list[Prediction], parts: Labelled, task: str, rule: Literal["label", "pair"]) -> Tensor:
    """Whether each answer is right: its label (polarity tasks share theirs), or task and label."""
    found = []
    for prediction, (_, labels) in zip(predictions, parts, strict=True):
        for own, label, true in zip(prediction.tasks, prediction.classes.tolist(), labels.tolist(), strict=True):
            found.append((own, label) == (task, true) if rule == "pair" else same_label(own, label, task, true))
    return torch.tensor(found)
