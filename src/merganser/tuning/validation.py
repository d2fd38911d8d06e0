"""A held-out score: the accuracy on labelled batches of several tasks."""

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
    """Mean accuracy over tasks as a function of weights.

    Calling it with weights returns the score; with `budget=n`, only the first n batches of each task are used.

    Args:
        module: The architecture, and the values of whatever the weights do not name. It is not changed.
        batches: For each task, batches of (inputs, targets).
        heads: For each task, a function from the module's output to logits.

    Raises:
        InputError: If a task has no batches, or heads and batches name different tasks.

    Example:
        >>> validation = mg.tuning.Validation(base, {"math": batches, "code": batches})
        >>> score = validation(math.state_dict())
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
            raise InputError(
                f"heads are for {sorted(self.heads)}, but data for {sorted(self.batches)}; name the same tasks"
            )
        object.__setattr__(self, "module", evaluation_copy(self.module))

    def __call__(self, weights: Weights, budget: int | None = None) -> float:
        scores = self.scores(weights, budget).values()
        return sum(scores) / len(scores)

    @torch.no_grad()
    def scores(self, weights: Weights, budget: int | None = None) -> dict[str, float]:
        """Return the accuracy on every task."""
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
