"""How much the knobs of input-adaptive merging matter: η × K, and ε."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from merganser.experts.adaptive import AdaptiveModel
from merganser.experts.heads import Prediction
from merganser.experts.inputs import Inputs
from merganser.experts.layers import accepted, task_cosines
from merganser.experts.routing import task_accuracy

#: Samples of one task: inputs and labels.
Labelled = Sequence[tuple[Inputs, Tensor]]
#: Whether an answer (task, class) is right for a sample of a task with a label; by default both must agree.
Correct = Callable[[str, int, str, int], bool]


def same_pair(task: str, label: int, true_task: str, true_label: int) -> bool:
    return (task, label) == (true_task, true_label)


def accuracy(prediction: Prediction, task: str, labels: Tensor, correct: Correct = same_pair) -> float:
    """Share of right answers on samples of one task."""
    answers = zip(prediction.tasks, prediction.classes.tolist(), labels.tolist(), strict=True)
    return sum(correct(found, label, task, true) for found, label, true in answers) / len(labels)


@dataclass(frozen=True)
class Choice:
    """Mean accuracy over tasks at a threshold and a number of tasks, and the mean size of the sets."""

    threshold: float
    top: int
    accuracy: float
    set_size: float


def sweep_choice(
    model: AdaptiveModel,
    data: Mapping[str, Labelled],
    thresholds: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.5),
    tops: Sequence[int] = (1, 2, 3, 5),
    correct: Correct = same_pair,
) -> list[Choice]:
    """η × K. The first pass is done once; the second once per pair."""
    weights = {task: [model.router.weights(model.first_pass(x).inputs) for x, _ in data[task]] for task in data}
    rows = []
    for threshold in thresholds:
        for top in tops:
            setting = model.with_settings(threshold=threshold, top=top)
            scores, sizes = [], []
            for task, batches in data.items():
                right = total = 0.0
                for (x, labels), w in zip(batches, weights[task], strict=True):
                    routing = setting.decide(w)
                    right += len(labels) * accuracy(setting.predict(x, routing), task, labels, correct)
                    total += len(labels)
                    sizes += [len(chosen) for chosen in routing.sets]
                scores.append(right / total)
            rows.append(Choice(threshold, top, sum(scores) / len(scores), sum(sizes) / len(sizes)))
    return rows


@dataclass(frozen=True)
class Redundancy:
    """At a cosine threshold: the experts in the fixed merge, and the task accuracy of the router that reads it."""

    redundancy: float
    accepted: tuple[str, ...]
    accuracy: float
    accuracy_among_top: float


def sweep_redundancy(
    model: AdaptiveModel,
    data: Mapping[str, Labelled],
    thresholds: Sequence[float] = (0.1, 0.2, 0.3, 0.5, 1.0),
) -> list[Redundancy]:
    """ε. Thresholds that accept the same experts share one first pass."""
    cosines = task_cosines(model.library)
    truth = [task for task, batches in data.items() for _, labels in batches for _ in labels]
    known: dict[tuple[str, ...], tuple[float, float]] = {}
    rows = []
    for threshold in thresholds:
        names = accepted(model.library.experts, cosines, threshold)
        if names not in known:
            other = model.with_accepted(names)
            weights = [
                other.router.weights(other.first_pass(x).inputs) for batches in data.values() for x, _ in batches
            ]
            found = task_accuracy(other.router.tasks, torch.cat(weights), truth, model.settings.top)
            known[names] = (found.first, found.among)
        rows.append(Redundancy(threshold, names, *known[names]))
    return rows
