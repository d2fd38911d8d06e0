"""The base class of models that adaptive ones are compared with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from merganser.errors import InputError, one_of
from merganser.library.library import Library
from merganser.modules.inputs import Inputs
from merganser.modules.moments import evaluating
from merganser.routing.choices import choose
from merganser.routing.composition import Composition
from merganser.routing.heads import HeadLike, Heads, HeadScore
from merganser.routing.models import Features, LibraryModel
from merganser.routing.predictions import Prediction


class Baseline(LibraryModel):
    """A model over a library that is built and called like an `AdaptiveModel`. Abstract.

    Args:
        module: The network. It must hold the base's weights.
        library: The experts.
        heads: The classification head of every expert, by its name.
        features: Turns the module's output and inputs into what the heads read, shape (samples, width). Needed
            unless the output itself has this shape.
        score: How answers of different heads are compared: `"logit"`, `"probability"` or `"posterior"`.
        merge: Parameters of the method `tsv`, where experts are merged.

    Example:
        >>> rivals = mg.routing.baselines
        >>> for kind in (rivals.Static, rivals.Smile):
        ...     tasks = kind(encoder, library, heads)(images).tasks
    """

    heads: Heads

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        heads: Mapping[str, HeadLike],
        *,
        features: Features | None = None,
        score: HeadScore = "logit",
        merge: Mapping[str, Any] | None = None,
    ) -> None:
        one_of("score", score, HeadScore)
        super().__init__(module, library, heads, features, merge or {})
        self.score: HeadScore = score
        #: The version of the module that `derive` has seen last.
        self._version = 0

    def derive(self) -> None:
        """Compute what a pass needs of the module's weights and the library: once, and again after a move."""

    def run(self, inputs: Inputs, task: str | None = None) -> tuple[Any, Tensor | None]:
        """Return the module's output and, if the method chooses among tasks, votes of shape (samples, tasks)."""
        if (version := self.composer.follow()) != self._version:
            self._version = version
            self.derive()
        return self.attempt(inputs, task)

    @abstractmethod
    def attempt(self, inputs: Inputs, task: str | None) -> tuple[Any, Tensor | None]:
        """Do the work of `run` where the module is now; only the oracle looks at the task."""

    @torch.no_grad()
    def forward(self, batch: Any, *, task: str | None = None) -> Prediction:
        """Answer a batch.

        Args:
            batch: A tensor, a tuple of the module's positional arguments or a mapping of its keyword arguments.
            task: The task whose head answers; by default the method decides.

        Returns:
            The prediction.

        Raises:
            InputError: If the batch does not fit the module, or `task` has no head.
        """
        self.asked(task)
        inputs = Inputs.of(batch, self.module)
        with evaluating(self):
            return self.answer(inputs, *self.run(inputs, task), task)

    @torch.no_grad()
    def answer(self, inputs: Inputs, output: Any, votes: Tensor | None, task: str | None = None) -> Prediction:
        """Answer a batch from the result of `run`."""
        tasks = self.library.experts
        asked = len(tasks) if votes is None else 1
        weights = torch.full((inputs.size, len(tasks)), 1 / len(tasks)) if votes is None else votes.cpu()
        routing = choose(tasks, weights, threshold=0.0, top=asked)
        found = self.heads.predict(self.features(output, inputs), routing, self.score, task=task)
        return found._replace(output=output)

    def averaged(self, scale: float, apart_from: Iterable[str] = ()) -> Composition:
        """Return θ₀ + scale · Σ Δ_t of every changed tensor, except those of some layers."""
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


def check_at_least_one(what: str, value: int) -> None:
    """Refuse numbers below one."""
    if value < 1:
        raise InputError(f"{what} {value}: must be at least 1")
