"""Who is rejected in a race: those surely worse than the leader, and the worse half of the rest.

All contenders answer the same questions, so they are compared item by item: what makes a question hard for all does not
count. The second rule bounds the cost whatever the answers are (sequential halving, Karnin et al. 2013): with K
contenders and questions that double from rung to rung, every rung costs about the same and there are log2 K of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from merganser.errors import InputError
from merganser.evaluate.search import rung_sizes
from merganser.evolve.arrays import Array
from merganser.evolve.design import Objective
from merganser.evolve.intervals import paired_interval
from merganser.evolve.racing import rungs

#: How sure one must be to reject a contender of the better half.
LEVEL = 0.95
#: Why a contender leaves that has no answers.
FAILED = "its answers are not numbers"
#: Questions of all tasks together on the first rung, at least: after fewer, halving would be a lottery.
FEWEST = 48


def score(objective: Objective, answers: Mapping[str, Array]) -> float:
    """Return the objective of answers, higher being better; minus infinity if it is not a number."""
    value = objective.value({task: float(values.mean()) for task, values in answers.items()})
    return -math.inf if math.isnan(value) else value


def reject(objective: Objective, answers: Mapping[str, Mapping[str, Array]]) -> tuple[list[str], dict[str, str]]:
    """Return who stays, the best first, and why each of the others does not.

    Args:
        objective: What contenders are compared by, to be maximised.
        answers: Of every contender, to the same questions of every task.
    """
    means = {label: score(objective, own) for label, own in answers.items()}
    order = sorted(answers, key=lambda label: -means[label])  # stable: of equals, the first
    leader, half = order[0], math.ceil(len(order) / 2)
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
    """Return the numbers of questions of each task after which contenders are rejected: doubling, up to `most`."""
    halvings = math.ceil(math.log2(max(2, contenders)))
    return rungs(min(most, max(math.ceil(FEWEST / tasks), math.ceil(most / 2 ** (halvings - 1)))), most)


def worst_case(contenders: int, ends: Sequence[int], cost: Callable[[int, int], int]) -> int:
    """Return how many questions a race asks at most; `cost` is that of one contender from one number to another."""
    sizes = rung_sizes(contenders, len(ends))
    return sum(size * cost(*span) for size, span in zip(sizes, pairwise((0, *ends)), strict=True) if size > 1)


def fit_to_budget(cost: Callable[[int], int], most: int, budget: int | None, what: str) -> int:
    """Return the largest number up to `most` whose cost is within the budget; `cost` never falls.

    Raises:
        InputError: Even one question of each task costs more.
    """
    if budget is None or cost(most) <= budget:
        return most
    if cost(1) > budget:
        raise InputError(f"a budget of {budget} questions is too small for {what}: at least {cost(1)} are needed")
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return low
