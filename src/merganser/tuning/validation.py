"""A held-out score: accuracy on labelled batches of several tasks, for everything here that chooses by a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from merganser.errors import InputError
from merganser.modules.batches import Batch, labelled, reusable
from merganser.modules.functional import Head, Weights, call, evaluation_copy

IGNORED = -100
"""The target that is not asked, as in `torch.nn.CrossEntropyLoss`."""


@dataclass(frozen=True, eq=False)
class Validation:
    """The mean over tasks of accuracy, as a function of weights: `Validation(module, {"task": batches})(weights)`.

    A task's batches are (inputs, targets); `budget` asks only that many of each. `heads` map the module's output to
    each task's logits. The module gives the architecture, and what weights do not name; it is not written to.
    """

    module: nn.Module
    batches: Mapping[str, Sequence[Batch]]
    heads: Mapping[str, Head] | None = None

    def __post_init__(self) -> None:
        listed = {task: list(reusable(batches, f"data of {task!r}")) for task, batches in self.batches.items()}
        if not listed or not all(listed.values()):
            raise InputError("a score needs at least one labelled batch (inputs, targets) of every task")
        pairs = {task: [labelled(batch, f"data of {task!r}") for batch in found] for task, found in listed.items()}
        object.__setattr__(self, "batches", pairs)
        if self.heads is not None and set(self.heads) != set(self.batches):
            raise InputError(f"heads for {sorted(self.heads)}, data for {sorted(self.batches)}: the same, please")
        object.__setattr__(self, "module", evaluation_copy(self.module))

    def __call__(self, weights: Weights, budget: int | None = None) -> float:
        scores = self.scores(weights, budget).values()
        return sum(scores) / len(scores)

    @torch.no_grad()
    def scores(self, weights: Weights, budget: int | None = None) -> dict[str, float]:
        """Accuracy on every task."""
        return {task: self._accuracy(weights, task, batches[:budget]) for task, batches in self.batches.items()}

    def _accuracy(self, weights: Weights, task: str, batches: Sequence[Batch]) -> float:
        right = asked = 0
        for inputs, targets in batches:
            output = call(self.module, weights, inputs)
            predicted = (self.heads[task](output) if self.heads else output).argmax(-1)
            if predicted.shape != targets.shape:
                raise InputError(
                    f"data of {task!r}: targets of shape {tuple(targets.shape)} for predictions of shape "
                    f"{tuple(predicted.shape)}; classes are expected"
                )
            wanted = targets != IGNORED
            right += int((predicted == targets)[wanted].sum())
            asked += int(wanted.sum())
        return right / asked if asked else float("nan")
