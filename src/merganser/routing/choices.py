"""Choose the set of experts to merge from router weights, and measure how often it contains the true task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from merganser.errors import InputError


@dataclass(frozen=True)
class Routing:
    """The decision of a router.

    Attributes:
        tasks: Names of the columns of `weights`.
        weights: Probability of each task for every sample, shape (samples, tasks).
        sets: The chosen experts of each sample.
        fallback: The samples for which no task reached the threshold, so that the best one was chosen.
    """

    tasks: tuple[str, ...]
    weights: Tensor
    sets: tuple[frozenset[str], ...]
    fallback: Tensor

    def repeated(self, size: int) -> Routing:
        """Return the decision for one sample as that of `size` samples."""
        return Routing(self.tasks, self.weights.expand(size, -1), self.sets * size, self.fallback.expand(size))

    def groups(self) -> dict[frozenset[str], Tensor]:
        """Return the indices of the samples of each set, in the order of their first sample."""
        found: dict[frozenset[str], list[int]] = {}
        for sample, chosen in enumerate(self.sets):
            found.setdefault(chosen, []).append(sample)
        return {chosen: torch.tensor(samples) for chosen, samples in found.items()}


def choose(tasks: Sequence[str], weights: Tensor, threshold: float, top: int) -> Routing:
    """Choose Ω, the `top` best tasks with w ≥ `threshold`, or the best task if there is none.

    Of equal weights, the task that comes first in the library wins.
    """
    if not 0 <= threshold <= 1:
        raise InputError(f"threshold {threshold}: weights lie between 0 and 1")
    if top < 1:
        raise InputError(f"top {top}: at least one task must be chosen")
    order = weights.sort(dim=1, descending=True, stable=True).indices[:, :top]
    kept = weights.gather(1, order) >= threshold
    fallback = ~kept.any(dim=1)
    kept[:, 0] |= fallback
    sets = tuple(
        frozenset(tasks[task] for task, there in zip(row, keep, strict=True) if there)
        for row, keep in zip(order.tolist(), kept.tolist(), strict=True)
    )
    return Routing(tuple(tasks), weights, sets, fallback)


@dataclass(frozen=True)
class TaskAccuracy:
    """How often the true task is the first and among the first `top`, as means over tasks, and per task."""

    first: float
    among: float
    top: int
    per_task: Mapping[str, float]


def task_accuracy(tasks: Sequence[str], weights: Tensor, truth: Sequence[str], top: int = 3) -> TaskAccuracy:
    """Return the task accuracy of a router from its weights and the true task of every sample."""
    order = weights.sort(dim=1, descending=True, stable=True).indices[:, :top].tolist()
    ranks: dict[str, list[tuple[bool, bool]]] = {}
    for row, task in zip(order, truth, strict=True):
        found = [tasks[index] for index in row]
        ranks.setdefault(task, []).append((found[0] == task, task in found))
    per_task = {task: sum(first for first, _ in hits) / len(hits) for task, hits in ranks.items()}
    among = [sum(there for _, there in hits) / len(hits) for hits in ranks.values()]
    return TaskAccuracy(sum(per_task.values()) / len(per_task), sum(among) / len(among), top, per_task)
