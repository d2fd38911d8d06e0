"""Reject contenders in a race: those significantly worse than the leader, and the worse half of the rest.

All contenders answer the same questions and are compared item by item, so that the difficulty of questions cancels. The
second rule bounds the cost for any answers (sequential halving, Karnin et al. 2013): with K contenders and questions
that double from rung to rung, every rung costs about the same and there are log2 K of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from merganser.errors import InputError
from merganser.evaluate.search import Rung, rung_sizes
from merganser.evolve.arrays import Array
from merganser.evolve.intervals import paired_interval
from merganser.evolve.objectives import Objective
from merganser.evolve.racing import rungs
from merganser.tuning.autopilot.contenders import Contender

#: Confidence needed to reject a contender of the better half.
LEVEL = 0.95
#: Reason for a contender without answers.
FAILED = "its answers are not numbers"
#: Minimum number of questions on the first rung, over all tasks: with fewer, halving would be random.
FEWEST = 48


@dataclass
class Heat:
    """One race: the contenders that were asked, its rungs, why contenders left, and whether the budget ended it."""

    order: list[Contender]
    rungs: list[Rung] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)
    stopped: bool = False


def score(objective: Objective, answers: Mapping[str, Array]) -> float:
    """Return the objective of answers, higher is better; minus infinity if it is not a number."""
    value = objective.value({task: float(values.mean()) for task, values in answers.items()})
    return -math.inf if math.isnan(value) else value


def reject(
    objective: Objective, answers: Mapping[str, Mapping[str, Array]], fewest: int = 1
) -> tuple[list[str], dict[str, str]]:
    """Return the contenders that stay, the best first, and why the others leave.

    Args:
        objective: The objective to maximise.
        answers: The answers of every contender to the same questions of every task.
        fewest: The number of contenders that leave only if they are significantly worse.
    """
    means = {label: score(objective, own) for label, own in answers.items()}
    order = sorted(answers, key=lambda label: -means[label])  # stable: of equals, the first
    leader, half = order[0], max(fewest, math.ceil(len(order) / 2))
    stay, why = [leader], {}
    for place, label in enumerate(order[1:], 1):
        if means[label] == -math.inf:
            why[label] = FAILED
        elif paired_interval(objective, answers[label], answers[leader], LEVEL).high < 0:
            why[label] = f"worse than {leader}"
        elif place >= half:
            why[label] = "in the worse half"
        else:
            stay.append(label)
    return stay, why


def rung_ends(contenders: int, most: int, tasks: int) -> tuple[int, ...]:
    """Return the numbers of questions per task after which contenders are rejected: doubling, up to `most`."""
    halvings = math.ceil(math.log2(max(2, contenders)))
    return rungs(min(most, max(math.ceil(FEWEST / tasks), math.ceil(most / 2 ** (halvings - 1)))), most)


def worst_case(contenders: int, ends: Sequence[int], cost: Callable[[int, int], int], fewest: int = 1) -> int:
    """Return the maximum number of questions of a race; `cost` is that of one contender from one number to another, and
    `fewest` contenders are rejected only for being worse.
    """
    sizes = [max(size, min(fewest, contenders)) for size in rung_sizes(contenders, len(ends))]
    return sum(size * cost(*span) for size, span in zip(sizes, pairwise((0, *ends)), strict=True) if size > 1)


def fit_to_budget(cost: Callable[[int], int], most: int, budget: int | None, what: str) -> int:
    """Return the largest number up to `most` whose cost is within the budget; `cost` must not decrease.

    Raises:
        InputError: If even one question per task costs more.
    """
    if budget is None or cost(most) <= budget:
        return most
    if cost(1) > budget:
        raise InputError(f"a budget of {budget} questions is too small for {what}: it needs at least {cost(1)}")
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return low
