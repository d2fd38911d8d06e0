"""Full evaluations that take answers over from the search, so that a candidate is asked no item twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from merganser.evolve.store import Answers, TrialEstimate
from merganser.evolve.workers import Outcome


def missing_items(items: Mapping[str, Sequence[int]], known: Mapping[str, Answers]) -> dict[str, list[int]]:
    """Return the items of each task without a known answer; a task without any is left out.

    Example:
        >>> missing_items({"quiz": [3, 5, 8]}, {"quiz": Answers(np.array([5]), np.array([1.0]))})
        {'quiz': [3, 8]}
    """
    have = {task: set(known[task].items.tolist()) if task in known else set() for task in items}
    left = {task: [item for item in chosen if item not in have[task]] for task, chosen in items.items()}
    return {task: chosen for task, chosen in left.items() if chosen}


def recall(outcome: Outcome, known: Mapping[str, Answers]) -> Outcome:
    """Return the outcome with the known answers beside its own; a failed one as it is.

    Args:
        outcome: The outcome of a job over `missing_items`.
        known: Answers to other items, by measure.
    """
    if outcome.answers is None:
        return outcome
    tasks = dict.fromkeys([*outcome.items, *(measure for measure in known if "." not in measure)])
    measures = dict.fromkeys([*outcome.answers, *known])
    items = {
        task: [*outcome.items.get(task, ()), *(known[task].items.tolist() if task in known else ())] for task in tasks
    }
    answers = {
        measure: [*outcome.answers.get(measure, ()), *(known[measure].values.tolist() if measure in known else ())]
        for measure in measures
    }
    return replace(outcome, items=items, answers=answers)


def count_answers(known: Mapping[str, Answers]) -> int:
    """Return the number of known answers, one for each item."""
    return sum(len(answers.items) for measure, answers in known.items() if "." not in measure)


def mean_scores(answers: Mapping[str, Answers]) -> tuple[dict[str, float], dict[str, TrialEstimate]]:
    """Return the mean of every measure, for trials that need no estimate."""
    return {measure: float(found.values.mean()) for measure, found in answers.items()}, {}
