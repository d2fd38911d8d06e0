"""A model over a library that answers with one of its heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from merganser.errors import InputError, one_of
from merganser.library.library import Library
from merganser.modules.inputs import Inputs
from merganser.routing.adaptive import Features
from merganser.routing.composition import Composer, Composition
from merganser.routing.heads import Head, Heads, Prediction, Score, default_features


class Baseline(ABC):
    """Built and asked as an `AdaptiveModel` is: `model(x)`, or `predict` with the task or without."""

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        heads: Mapping[str, Head],
        *,
        features: Features | None = None,
        score: Score = "logit",
    ) -> None:
        one_of("score", score, Score)
        self.module = module
        self.library = library
        self.heads = Heads(heads, library.experts)
        self.composer = Composer(module, library, {}, load_base=False)
        self.features = features or (lambda output, inputs: default_features(output))
        self.score: Score = score

    def __call__(self, *args: Any, **kwargs: Any) -> Prediction:
        """Answer a batch given as the module takes it."""
        return self.predict(Inputs.of_call(self.module, args, kwargs))

    @abstractmethod
    def run(self, inputs: Inputs) -> tuple[Any, Tensor | None]:
        """The module's output, and votes for the tasks (samples × tasks) if the method chooses among them."""

    @torch.no_grad()
    def predict(self, batch: Any, task: str | None = None) -> Prediction:
        """The best (task, class) of every sample, or the best class of `task` if it is given."""
        self.heads.check(task)
        inputs = Inputs.of(batch, self.module)
        return self.answer(inputs, *self.run(inputs), task)

    @torch.no_grad()
    def answer(self, inputs: Inputs, output: Any, votes: Tensor | None, task: str | None = None) -> Prediction:
        """The same from what `run` gave."""
        tasks = self.library.experts
        if votes is None:
            sets = (frozenset(tasks),) * inputs.size
            votes = torch.full((inputs.size, len(tasks)), 1 / len(tasks))
        else:
            sets = tuple(frozenset([tasks[index]]) for index in votes.argmax(1).tolist())
        return self.heads.predict(self.features(output, inputs), sets, votes.cpu(), self.score, task=task)

    def averaged(self, scale: float, apart_from: Iterable[str] = ()) -> Composition:
        """θ₀ + scale · Σ Δ_t of every changed tensor, but for those of some layers."""
        theirs = {f"{layer}.{part}" for layer in apart_from for part in ("weight", "bias")}
        whole = {}
        experts = [self.library.expert(name) for name in self.library.experts]
        for name, stored in self.composer.stored.items():
            changed = [expert for expert in experts if stored in expert.file.kinds and expert.merges(stored)]
            if changed and name not in theirs:
                tensor = self.composer.tensors[name].detach()
                total = sum((expert.delta(stored) for expert in changed), torch.zeros(()))
                whole[name] = tensor + scale * total.to(tensor)
        return Composition(frozenset(self.library.experts), {}, whole)


def at_least_one(what: str, value: int) -> None:
    """Refuse numbers of things below one."""
    if value < 1:
        raise InputError(f"{what} {value}: must be at least 1")
