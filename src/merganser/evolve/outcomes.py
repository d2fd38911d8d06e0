"""Check the results of workers before they are recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from merganser.errors import InputError
from merganser.evolve.store import Answers
from merganser.evolve.workers import Outcome


def check_answers(outcome: Outcome, graded: Sequence[str]) -> dict[str, Answers]:
    """Return the evaluator's answers in the order of the items.

    Args:
        outcome: The outcome of a job that did not fail.
        graded: Tasks whose answers must be in [0, 1], for IRT.

    Raises:
        InputError: If there is not exactly one finite answer per item.
    """
    assert outcome.answers is not None
    requested = outcome.items
    if missing := [name for name in requested if name not in outcome.answers]:
        raise InputError(f"the evaluator gave no answers for task {missing[0]!r}")
    found = {}
    for measure, values in outcome.answers.items():
        items = requested.get(measure.split(".")[0])
        if items is None:
            raise InputError(f"the evaluator answered {measure!r}, which is not a task of this study")
        if len(values) != len(items):
            raise InputError(f"the evaluator gave {len(values)} answers for the {len(items)} items of {measure!r}")
        order = np.argsort(items)
        found[measure] = Answers(np.asarray(items, dtype=np.int64)[order], np.asarray(values, dtype=np.float64)[order])
        if not np.isfinite(found[measure].values).all():
            raise InputError(f"the evaluator gave answers to {measure!r} that are not finite")
        low, high = found[measure].values.min(), found[measure].values.max()
        if measure in graded and (low < 0 or high > 1):
            raise InputError(f"answers to {measure!r} from {low:g} to {high:g}: IRT needs them in [0, 1]")
    return found
