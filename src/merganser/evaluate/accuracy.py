"""Scores of a merged model beside those of its experts."""

from __future__ import annotations

import math
from collections.abc import Mapping

from merganser.errors import InputError, did_you_mean


def normalized_accuracy(merged: Mapping[str, float], experts: Mapping[str, float]) -> float:
    """Return (1/T) Σ_t acc_t(merged) / acc_t(expert t), which is 1 if the merge equals the experts.

    Args:
        merged: Accuracies of the merged model by task.
        experts: Accuracy of each task's expert.

    Returns:
        The normalised accuracy.

    Example:
        >>> mg.evaluate.normalized_accuracy({"math": 0.45, "code": 0.8}, {"math": 0.5, "code": 0.8})
        0.95
    """
    if not merged:
        raise InputError("no tasks to normalise over")
    for task in merged:
        if task not in experts:
            raise InputError(f"no expert's score on {task!r}{did_you_mean(task, experts)}")
        if not experts[task] > 0:
            raise InputError(f"the expert of {task!r} scores {experts[task]}: cannot normalise by it")
    return math.fsum(score / experts[task] for task, score in merged.items()) / len(merged)
