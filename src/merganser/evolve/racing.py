"""Racing: ask a candidate its items in rungs, and stop once it almost certainly gains little over the best.

After 5, 10, 20 … items of every task, its answers are compared item by item with an incumbent's answers. A candidate is
stopped if the whole interval of its gain is below `MARGIN`; its estimate is then the incumbent's estimate plus the
difference on the items that both were asked, which does not depend on how easy those items are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from merganser.evolve.arrays import Array
from merganser.evolve.intervals import paired_interval
from merganser.evolve.measures import task_of
from merganser.evolve.objectives import Objective
from merganser.evolve.preparation import Prepared
from merganser.evolve.ranking import best, pareto
from merganser.evolve.store import Answers, Trial, TrialEstimate

#: Confidence at every rung, and the gain that is worth more questions: without a margin most candidates, being similar,
#: would be asked everything (`benchmarks/evolve_racing.py` measures both).
LEVEL, MARGIN = 0.8, 0.03


def rungs(first: int, most: int) -> tuple[int, ...]:
    """Return the numbers of items after which a candidate is judged: `first`, its doubles, and all of them.

    Example:
        >>> rungs(5, 30)
        (5, 10, 20, 30)
    """
    found = [first]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return tuple(found)


@dataclass(frozen=True)
class Race:
    """The competition of a candidate: answers of incumbents to the items in the order of the race.

    Attributes:
        first: Items of every task in the first rung.
        incumbents: By measure, answers to all items in the order of the race.
        objectives: The objectives to compare by.
    """

    first: int
    incumbents: tuple[Mapping[str, Array], ...]
    objectives: tuple[Objective, ...]

    def parts(self, items: Mapping[str, Sequence[int]]) -> list[dict[str, Sequence[int]]]:
        """Return the items that each rung adds."""
        ends = rungs(self.first, max(map(len, items.values())))
        cut = [{task: chosen[a:b] for task, chosen in items.items()} for a, b in zip((0, *ends), ends, strict=False)]
        return [{task: chosen for task, chosen in part.items() if len(chosen)} for part in cut]

    def lost(self, answers: Mapping[str, Sequence[float]]) -> int | None:
        """Return the first incumbent over which the candidate gains too little at every objective, or None.

        Args:
            answers: The candidate's answers to the first items of each task.
        """
        own = {measure: np.asarray(values, dtype=np.float64) for measure, values in answers.items()}
        if any(measure not in own for objective in self.objectives for measure in objective.measures):
            return None  # raised later, where answers are checked
        for number, theirs in enumerate(self.incumbents):
            beside = {measure: values[: len(own[measure])] for measure, values in theirs.items() if measure in own}
            if any(len(beside[measure]) != len(own[measure]) for measure in beside):
                return None
            if all(paired_interval(o, own, beside, LEVEL).high < MARGIN * scale(o) for o in self.objectives):
                return number
        return None


def scale(objective: Objective) -> float:
    """Return the effect of a difference of 1 in every answer: Σ |weight|."""
    return sum(map(abs, objective.measures.values()))


def race_against(
    rivals: Sequence[Mapping[str, Answers]],
    items: Mapping[str, Sequence[int]],
    first: int,
    objectives: tuple[Objective, ...],
) -> Race:
    """Return the race against incumbents.

    Args:
        rivals: Answers of the incumbents, by measure.
        items: The items of every task, in the order of the race.
        first: Items of every task in the first rung.
        objectives: The objectives to compare by.
    """
    rows = []
    for answers in rivals:
        places = {measure: np.searchsorted(a.items, items[task_of(measure)]) for measure, a in answers.items()}
        rows.append({measure: a.values[places[measure]] for measure, a in answers.items()})
    return Race(first, tuple(rows), objectives)


def race_order(prepared: Prepared, task: str, seed: int) -> list[int]:
    """Return the order in which a task's chosen items are asked: random, the same for all candidates."""
    generator = np.random.default_rng([seed, zlib.crc32(task.encode()), 1])
    return [int(place) for place in generator.permutation(len(prepared.subset))]


def choose_incumbents(trials: Sequence[Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """Return the best of the trials that were asked everything; for several objectives, their Pareto front."""
    whole = [trial for trial in trials if trial.may_win and trial.cached_from is None]
    if not whole:
        return []
    return [best(whole, objectives)] if len(objectives) == 1 else pareto(whole, objectives)


def estimate_stopped(
    answers: Mapping[str, Answers], incumbent: Trial, theirs: Mapping[str, Answers], tasks: Mapping[str, Prepared]
) -> dict[str, TrialEstimate]:
    """Return the estimates of a stopped candidate: F̂(incumbent) + Σ w (y − y_incumbent) / Σ w over the items it was
    asked, by measure.
    """
    found: dict[str, TrialEstimate] = {}
    for measure, own in answers.items():
        task = tasks[task_of(measure)]
        weight = dict(zip(task.items, task.subset.weights.tolist(), strict=True))
        known = dict(zip(theirs[measure].items.tolist(), theirs[measure].values.tolist(), strict=True))
        weights = np.array([weight[item] for item in own.items.tolist()])
        differences = own.values - np.array([known[item] for item in own.items.tolist()])
        gap = float(weights @ differences / weights.sum())
        found[measure] = TrialEstimate(incumbent.estimates[measure].value + gap)
    return found
