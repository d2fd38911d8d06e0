"""Which test sentences or images a model gets right, stored as bits, and what follows: accuracies and differences.

Answers of several models on the same sentences are compared in pairs, sentence by sentence: most of the uncertainty of
an accuracy is that of the sentences, which the models share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: By fine-tuning seed and task, whether each test sentence was answered right.
Answers = Mapping[str, Mapping[str, np.ndarray]]


def pack(right: np.ndarray) -> str:
    """Return booleans as hexadecimal digits, the last byte filled with zeros."""
    return np.packbits(right.astype(bool)).tobytes().hex()


def unpack(digits: str, count: int) -> np.ndarray:
    """Return the first `count` booleans of `pack`."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8), count=count).astype(bool)


def read(stored: Mapping[str, Mapping[str, str]], sentences: Mapping[str, int]) -> Answers:
    """Return the answers of a stored row, by seed and task."""
    return {seed: {task: unpack(bits, sentences[task]) for task, bits in own.items()} for seed, own in stored.items()}


def accuracies(answers: Answers, seed: str) -> dict[str, float]:
    """Return the accuracy on every task of one seed."""
    return {task: float(right.mean()) for task, right in answers[seed].items()}


def normalised(answers: Answers, experts: Answers, seed: str) -> float:
    """Return the mean over tasks of accuracy over the expert's, of one seed."""
    own = accuracies(experts, seed)
    found = accuracies(answers, seed)
    return float(np.mean([found[task] / own[task] for task in found]))


@dataclass(frozen=True)
class Score:
    """A mean over seeds and its standard error; of a difference of normalised accuracies, or of one."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: np.ndarray) -> Score:
        """The mean of independent values, with the standard error that their spread gives; without one, of one."""
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(float(values.mean()), error)

    @property
    def clear(self) -> bool:
        """Whether the mean is more than two standard errors from zero."""
        return abs(self.mean) > 2 * self.error


def difference(first: Answers, second: Answers | None, experts: Answers) -> Score:
    """Return normalised accuracy of `first` less that of `second` (None: zero), over the seeds that all have.

    The variance is the sum of two: of the sentences, whose paired differences are averaged over seeds first, and of
    the means of the seeds. With one seed it is that of the sentences alone.
    """
    seeds = [seed for seed in first if seed in experts and (second is None or seed in second)]
    means, variance = [], 0.0
    tasks = list(first[seeds[0]])
    for task in tasks:
        paired = np.stack(
            [
                (first[seed][task].astype(float) - (0.0 if second is None else second[seed][task].astype(float)))
                / experts[seed][task].mean()
                for seed in seeds
            ]
        )
        means.append(paired.mean(1))
        variance += float(paired.mean(0).var(ddof=1)) / paired.shape[1]
    by_seed = np.mean(means, axis=0)
    variance /= len(tasks) ** 2
    if len(seeds) > 1:
        variance += float(by_seed.var(ddof=1)) / len(seeds)
    return Score(float(by_seed.mean()), math.sqrt(variance))


def paired(first: np.ndarray, second: np.ndarray) -> Score:
    """Return accuracy of `first` less that of `second` on the same images, each of shape (runs, images).

    The variance is the sum of that of the images, whose paired differences are averaged over runs first, and of the
    means of the runs where there are several.
    """
    gap = first.mean(0) - second.mean(0)
    variance = float(gap.var(ddof=1)) / len(gap)
    for runs in (first, second):
        if len(runs) > 1:
            variance += float(runs.mean(1).var(ddof=1)) / len(runs)
    return Score(float(gap.mean()), math.sqrt(variance))


def leaders(rows: Mapping[str, Answers], experts: Answers) -> dict[str, Score]:
    """Return the differences from the best row; a row that is not clearly below it (two standard errors) leads too."""
    best = max(rows, key=lambda name: difference(rows[name], None, experts).mean)
    return {name: difference(own, rows[best], experts) for name, own in rows.items()}


def summary(answers: Answers, experts: Answers) -> dict[str, Any]:
    """Return mean accuracy, and normalised accuracy with its standard error and its values by seed."""
    score = difference(answers, None, experts)
    flat: Sequence[float] = [value for seed in answers for value in accuracies(answers, seed).values()]
    return {
        "accuracy": float(np.mean(flat)),
        "normalised": score.mean,
        "error": score.error,
        "by_seed": {seed: normalised(answers, experts, seed) for seed in answers},
    }
