"""Confidence intervals of scores and of differences of scores, valid even if all answers are equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri, stdtrit

from merganser.evolve.arrays import Array
from merganser.evolve.measures import task_of
from merganser.evolve.objectives import Objective


@dataclass(frozen=True)
class Interval:
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    @property
    def verdict(self) -> str:
        """Return what is known about a difference: "better", "worse", or "cannot tell"."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "cannot tell"


def standard_error(values: Array) -> float:
    """Return the standard error of a mean; for answers in [0, 1] Agresti and Coull's, which is never 0.

    √(p̃(1 − p̃)/(n + 4)) with p̃ = (Σy + 2)/(n + 4): a perfect score on few items is uncertain.
    """
    if _grade(values):
        count = len(values) + 4
        p = (float(values.sum()) + 2) / count
        return float((p * (1 - p) / count) ** 0.5)
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def score_interval(values: Array, level: float = 0.95) -> Interval:
    """Return a mean with its interval: Wilson's for answers in [0, 1], Student's for others.

    Args:
        values: Answers, one per item.
        level: The confidence level.

    Returns:
        The mean and its interval.

    Example:
        >>> str(score_interval(np.ones(20)))
        '1.000 (0.839 to 1.000)'
    """
    mean, count = float(values.mean()), len(values)
    if not _grade(values):
        reach = float(stdtrit(count - 1, 0.5 + level / 2)) * standard_error(values) if count > 1 else float("inf")
        return Interval(mean, mean - reach, mean + reach)
    z = float(ndtri(0.5 + level / 2))
    centre = (mean + z**2 / (2 * count)) / (1 + z**2 / count)
    reach = z / (1 + z**2 / count) * float((mean * (1 - mean) / count + z**2 / (4 * count**2)) ** 0.5)
    return Interval(mean, min(mean, centre - reach), max(mean, centre + reach))


def objective_error(objective: Objective, answers: Mapping[str, Array]) -> float:
    """Return the standard error of a weighted sum of means.

    Measures of one task are on the same items; different tasks have different items.
    """
    parts = _combine_by_task(objective, answers)
    return float(sum((scale * standard_error(values)) ** 2 for scale, values in parts) ** 0.5)


def objective_interval(objective: Objective, answers: Mapping[str, Array]) -> Interval:
    """Return an objective's value with its 95 % interval; for one measure, the interval of its score.

    The intervals [l_i, h_i] of the tasks' scores p_i are combined (Zou and Donner): Σ w_i p_i − √(Σ w_i² (p_i − l_i)²)
    to Σ w_i p_i + √(Σ w_i² (h_i − p_i)²), which never leaves the objective's range.

    Args:
        objective: The weighted sum of measures.
        answers: Answers by measure, one per item.

    Returns:
        The objective's value and its interval.

    Example:
        >>> str(objective_interval(Objective.of("quiz"), {"quiz": np.ones(20)}))
        '1.000 (0.839 to 1.000)'
    """
    value = objective.value({measure: float(values.mean()) for measure, values in answers.items()})
    below = above = 0.0
    for scale, values in _combine_by_task(objective, answers):
        part = score_interval(values)
        down, up = (scale * (part.value - part.low), scale * (part.high - part.value))
        if scale < 0:
            down, up = up, down
        below, above = below + down**2, above + up**2
    return Interval(value, value - below**0.5, value + above**0.5)


def _combine_by_task(objective: Objective, answers: Mapping[str, Array]) -> list[tuple[float, Array]]:
    """Return for each task a scale and the weighted sum of its measures, item by item, divided by the scale: answers
    in [0, 1] stay there.
    """
    tasks: dict[str, dict[str, float]] = {}
    for measure, weight in objective.measures.items():
        tasks.setdefault(task_of(measure), {})[measure] = weight
    found = []
    for weights in tasks.values():
        scale = sum(weights.values()) or 1.0
        found.append((scale, sum((w / scale * answers[measure] for measure, w in weights.items()), np.zeros(1))))
    return found


def paired_interval(
    objective: Objective, left: Mapping[str, Array], right: Mapping[str, Array], level: float = 0.95
) -> Interval:
    """Return by how much `left` is better than `right` at an objective, both asked the same items.

    The differences are taken item by item, so that the difficulty of items cancels. For answers in [0, 1] half an item
    is added to each of the four outcomes (Agresti and Min), so that a few equal answers prove nothing.

    Args:
        objective: The weighted sum of measures, and its direction.
        left: Answers by measure.
        right: Answers of the other model to the same items.
        level: The confidence level.

    Returns:
        The difference, positive if `left` is better, and its interval.

    Example:
        >>> ones, zeros = {"quiz": np.ones(30)}, {"quiz": np.zeros(30)}
        >>> paired_interval(Objective.of("quiz"), ones, zeros).verdict
        'better'
    """
    tasks: dict[str, Array] = {}
    scales: dict[str, float] = {}
    for measure, weight in objective.measures.items():
        task = task_of(measure)
        tasks[task] = tasks.get(task, 0.0) + objective.sign * weight * (left[measure] - right[measure])
        graded = _grade(left[measure]) and _grade(right[measure])
        scales[task] = scales.get(task, 0.0) + (abs(weight) if graded else float("nan"))
    difference, centre, variance, freedom = 0.0, 0.0, 0.0, float("inf")
    for task, values in tasks.items():
        count, scale = len(values), scales[task]
        difference += float(values.mean())
        if np.isnan(scale):
            centre += float(values.mean())
            variance += float(values.var(ddof=1)) / count if count > 1 else float("inf")
            freedom = min(freedom, count - 1)
        else:
            mean = float(values.sum()) / (count + 2)
            centre += mean
            variance += (float((values**2).sum() + scale**2) / (count + 2) - mean**2) / (count + 2)
    quantile = float(ndtri(0.5 + level / 2) if freedom == float("inf") else stdtrit(max(freedom, 1), 0.5 + level / 2))
    reach = quantile * variance**0.5
    return Interval(difference, min(difference, centre - reach), max(difference, centre + reach))


def gain_over_best(
    objective: Objective, own: Mapping[str, Array], others: Mapping[str, Mapping[str, Array]]
) -> tuple[str, Interval]:
    """Return the best of other models on these items, and by how much a model is better than it.

    The best of several models owes a part of its score to luck on the items that chose it. The gain over it is
    therefore underestimated, and the upper end of the interval is that of a Bonferroni correction for their number.

    Args:
        objective: The weighted sum of measures, and its direction.
        own: Answers by measure.
        others: Answers of the other models to the same items, by label.

    Returns:
        The label of the best, and the 95 % interval of the gain.

    Example:
        >>> gain_over_best(Objective.of("quiz"), {"quiz": np.ones(30)}, {"a": {"quiz": np.zeros(30)}})[1].verdict
        'better'
    """

    def score(label: str) -> float:
        return objective.sign * objective.value({m: float(others[label][m].mean()) for m in objective.measures})

    best = max(others, key=score)
    gain = paired_interval(objective, own, others[best])
    corrected = paired_interval(objective, own, others[best], 1 - 0.05 / len(others))
    return best, replace(gain, high=corrected.high)


def _grade(values: Array) -> bool:
    return bool(len(values)) and float(values.min()) >= 0 and float(values.max()) <= 1
