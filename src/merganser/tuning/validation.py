"""A held-out score: the accuracy on labelled batches of several tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from merganser.errors import InputError
from merganser.modules.batches import Batch, InputsLike, require_targets, reusable
from merganser.modules.functional import Head, Weights, call, evaluation_copy
from merganser.modules.inputs import map_tensors

IGNORED = -100
"""The ignored target, as in `torch.nn.CrossEntropyLoss`."""


@dataclass(frozen=True, eq=False)
class Validation:
    """Mean accuracy over tasks as a function of weights.

    Calling it with weights returns the score; with `budget=n`, only the first n batches of each task are used.

    Args:
        module: The architecture, with values of tensors that the weights do not name. It is not changed.
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
        pairs = {
            task: [require_targets(batch, f"data of {task!r}") for batch in found] for task, found in listed.items()
        }
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

    def counts(self) -> dict[str, int]:
        """Return the number of samples of every task that have a target."""
        return {task: len(self._find_places(task)) for task in self.batches}

    @torch.no_grad()
    def answers(self, weights: Weights, samples: Mapping[str, Sequence[int]]) -> dict[str, list[float]]:
        """Return the share of correctly predicted targets for some samples of every task.

        Args:
            weights: The weights to score.
            samples: Indices of samples by task, counted over its batches among those with a target.
        """
        return {task: self._answers(weights, task, chosen) for task, chosen in samples.items()}

    def _answers(self, weights: Weights, task: str, chosen: Sequence[int]) -> list[float]:
        places = self._find_places(task)
        found = [0.0] * len(chosen)
        by_batch: dict[int, list[int]] = {}
        for position, sample in enumerate(chosen):
            by_batch.setdefault(places[sample][0], []).append(position)
        for batch, positions in by_batch.items():
            inputs, targets = self.batches[task][batch]
            rows = torch.tensor([places[chosen[position]][1] for position in positions])
            right, wanted = self._judge_predictions(weights, task, (_select(inputs, rows, len(targets)), targets[rows]))
            shares = right.reshape(len(rows), -1).sum(1) / wanted.reshape(len(rows), -1).sum(1)
            for position, share in zip(positions, shares.tolist(), strict=True):
                found[position] = share
        return found

    def _find_places(self, task: str) -> list[tuple[int, int]]:
        """Return the batch and the row of every sample that has a target."""
        return [
            (number, row)
            for number, (_, targets) in enumerate(self.batches[task])
            for row in (targets != IGNORED).reshape(len(targets), -1).any(1).nonzero()[:, 0].tolist()
        ]

    def _accuracy(self, weights: Weights, task: str, batches: Sequence[Batch]) -> float:
        right = asked = 0
        for batch in batches:
            hits, wanted = self._judge_predictions(weights, task, batch)
            right += int(hits.sum())
            asked += int(wanted.sum())
        return right / asked if asked else float("nan")

    def _judge_predictions(self, weights: Weights, task: str, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return which targets are predicted correctly, and which are not ignored."""
        inputs, targets = batch
        output = call(self.module, weights, inputs)
        logits = self.heads[task](output) if self.heads else output
        predicted = logits.argmax(-1)
        if predicted.shape != targets.shape:
            raise InputError(
                f"data of {task!r}: targets of shape {tuple(targets.shape)} for predictions of shape "
                f"{tuple(predicted.shape)}; expected classes"
            )
        wanted = targets != IGNORED
        odd = targets[wanted & ((targets < 0) | (targets >= logits.shape[-1]))]
        if odd.numel():
            raise InputError(f"data of {task!r}: target {odd[0].item()}, but logits of {logits.shape[-1]} classes")
        return (predicted == targets) & wanted & ~logits.isnan().any(-1), wanted


def _select(inputs: InputsLike, rows: Tensor, count: int) -> InputsLike:
    """Return some samples of a batch of `count`; tensors of another length are shared by all samples."""
    found: InputsLike = map_tensors(inputs, lambda each: each[rows] if each.dim() and len(each) == count else each)
    return found
