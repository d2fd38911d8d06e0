"""Measure how much the settings of input-adaptive merging matter: η × K, and ε."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from merganser.errors import InputError, one_of
from merganser.modules.inputs import Inputs
from merganser.routing.adaptive import AdaptiveModel
from merganser.routing.choices import Routing, task_accuracy
from merganser.routing.heads import HeadScore
from merganser.routing.layers import filter_redundant, task_cosines
from merganser.routing.predictions import Prediction
from merganser.routing.samples import Labelled, batches_by_task, labelled_by_task

#: Whether an answer (task, class) is correct for a sample of a task with a label; by default both must agree.
Correct = Callable[[str, int, str, int], bool]


def same_pair(task: str, label: int, true_task: str, true_label: int) -> bool:
    return (task, label) == (true_task, true_label)


def accuracy(prediction: Prediction, task: str, labels: Tensor, correct: Correct = same_pair) -> float:
    """Return the share of correct answers on samples of one task."""
    answers = zip(prediction.tasks, prediction.classes.tolist(), labels.tolist(), strict=True)
    return sum(correct(found, label, task, true) for found, label, true in answers) / len(labels)


@dataclass(frozen=True)
class ThresholdScore:
    """Mean accuracy over tasks and mean size of the sets at one `threshold`, `top` and `score`."""

    threshold: float
    top: int
    score: HeadScore
    accuracy: float
    set_size: float


def sweep_choice(
    model: AdaptiveModel,
    data: Mapping[str, Labelled],
    thresholds: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.5),
    tops: Sequence[int] = (1, 2, 3, 5),
    scores: Sequence[HeadScore] = (),
    correct: Correct = same_pair,
) -> list[ThresholdScore]:
    """Measure the accuracy for every pair of η and K.

    The first pass runs once, the second once for all pairs that choose the same sets.

    Args:
        model: An adaptive model with heads.
        data: For every task, batches with labels.
        thresholds: Values of η.
        tops: Values of K.
        scores: Ways to compare heads; the model's own by default.
        correct: Returns whether (task, class) is correct for (true task, true label); by default both must agree.

    Returns:
        One row per combination.

    Raises:
        InputError: If the model has no heads.

    Example:
        >>> model = mg.routing.AdaptiveModel(encoder, library, heads)
        >>> rows = mg.routing.sweep_choice(model, {"math": batches, "code": batches})
        >>> best = max(rows, key=lambda row: row.accuracy)
    """
    if model.heads is None:
        raise InputError("counting answers needs a model with heads")
    ways = tuple(scores) or (model.settings.score,)
    for way in ways:
        one_of("score", way, HeadScore)
    settings = [model.with_settings(threshold=threshold, top=top) for threshold in thresholds for top in tops]
    samples = labelled_by_task(data, model.library.experts)
    weights = {task: [model.weigh(x) for x, _ in parts] for task, parts in samples.items()}
    known: dict[tuple[frozenset[str], ...], tuple[float, ...]] = {}
    rows = []
    for setting in settings:
        routings = {
            task: [setting.decide(w, x.size) for w, (x, _) in zip(parts, samples[task], strict=True)]
            for task, parts in weights.items()
        }
        sets = tuple(chosen for parts in routings.values() for part in parts for chosen in part.sets)
        if sets not in known:
            known[sets] = _accuracies(setting, samples, routings, ways, correct)
        threshold, top, size = setting.settings.threshold, setting.settings.top, sum(map(len, sets)) / len(sets)
        rows += [ThresholdScore(threshold, top, way, found, size) for way, found in zip(ways, known[sets], strict=True)]
    return rows


def _accuracies(
    model: AdaptiveModel,
    data: Mapping[str, Sequence[tuple[Inputs, Tensor]]],
    routings: Mapping[str, Sequence[Routing]],
    ways: Sequence[HeadScore],
    correct: Correct,
) -> tuple[float, ...]:
    """Return the mean accuracy over tasks for every way to compare heads."""
    found = torch.zeros(len(ways), dtype=torch.float64)
    for task, batches in data.items():
        total = sum(len(labels) for _, labels in batches)
        for (x, labels), routing in zip(batches, routings[task], strict=True):
            passed: Prediction = model(x, routing=routing)
            for place, way in enumerate(ways):
                right = len(labels) * accuracy(model.answer(x, passed, score=way), task, labels, correct)
                found[place] += right / total / len(data)
    return tuple(found.tolist())


@dataclass(frozen=True)
class Redundancy:
    """The experts in the fixed merge at one cosine threshold, and the task accuracy of the router that reads it."""

    redundancy: float
    accepted: tuple[str, ...]
    accuracy: float
    accuracy_among_top: float


def sweep_redundancy(
    model: AdaptiveModel,
    batches: Mapping[str, Iterable[Any]],
    thresholds: Sequence[float] = (0.1, 0.2, 0.3, 0.5, 1.0),
) -> list[Redundancy]:
    """Measure the task accuracy of the router for several values of ε, samples routed one by one.

    Args:
        model: The adaptive model.
        batches: Batches of every task.
        thresholds: Values of ε. Those that accept the same experts share one first pass.

    Returns:
        One row per threshold.

    Example:
        >>> model = mg.routing.AdaptiveModel(encoder, library, heads)
        >>> rows = mg.routing.sweep_redundancy(model, {"math": [images], "code": [images]})
    """
    samples = batches_by_task(batches, model.library.experts, model.module)
    truth = [task for task, parts in samples.items() for inputs in parts for _ in range(inputs.size)]
    model = model.with_settings(per_batch=False, probes=None)
    cosines = task_cosines(model.library)
    known: dict[tuple[str, ...], tuple[float, float]] = {}
    rows = []
    for threshold in thresholds:
        names = filter_redundant(model.library.experts, cosines, threshold)
        if names not in known:
            other = model.with_accepted(names)
            weights = torch.cat([other.weigh(inputs) for parts in samples.values() for inputs in parts])
            found = task_accuracy(other.router.tasks, weights, truth, model.settings.top)
            known[names] = (found.first, found.among)
        rows.append(Redundancy(threshold, names, *known[names]))
    return rows
