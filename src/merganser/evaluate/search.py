"""Choose coefficients by a held-out score: a grid, or successive halving."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from merganser.errors import InputError, did_you_mean
from merganser.modules.functional import Weights, combine
from merganser.plain import Result

ALPHAS = tuple(round(0.1 * step, 1) for step in range(1, 21))
"""Scaling coefficients 0.1 … 2.0, which cover task arithmetic and spectral methods (above 1)."""


@dataclass(frozen=True)
class Rung(Result):
    """Scores of the remaining candidates, each on `budget` units (samples, batches) of validation data."""

    budget: int
    scores: dict[str, float]


@dataclass(frozen=True)
class ScaleSearch(Result):
    """All rungs, and the best candidate of the last one; `spent` counts budget units over all evaluations."""

    rungs: tuple[Rung, ...]
    best: str
    score: float
    spent: int


def rung_sizes(candidates: int, rungs: int, keep: float = 0.5) -> list[int]:
    """Return how many candidates are scored on each rung of successive halving."""
    sizes = [candidates]
    while len(sizes) < rungs:
        sizes.append(_check_kept(sizes[-1], keep))
    return sizes


def _check_kept(count: int, keep: float) -> int:
    return max(1, math.ceil(keep * count))


def successive_halving(
    candidates: Sequence[str],
    score: Callable[[str, int], float],
    *,
    budgets: Sequence[int],
    keep: float = 0.5,
) -> ScaleSearch:
    """Score all candidates on the first budget, the best `keep` of them on the next, and so on; higher is better.

    One budget is a plain grid search. Ties and equal scores keep the order given, so the result is reproducible. Scores
    that are not numbers (NaN) rank last.
    """
    if not candidates or len(set(candidates)) != len(candidates):
        raise InputError(f"expected at least one candidate, all different, got {list(candidates)}")
    if not budgets or list(budgets) != sorted(set(budgets)) or budgets[0] < 1:
        raise InputError(f"budgets must be positive and rise, got {list(budgets)}")
    if not 0 < keep < 1:
        raise InputError(f"keep must lie between 0 and 1, got {keep}")
    remaining, rungs = list(candidates), []
    for index, budget in enumerate(budgets):
        if index:
            remaining = remaining[: _check_kept(len(remaining), keep)]
        scores = {candidate: float(score(candidate, budget)) for candidate in remaining}
        remaining.sort(key=lambda c: math.inf if math.isnan(scores[c]) else -scores[c])
        rungs.append(Rung(budget, scores))
    best = remaining[0]
    return ScaleSearch(tuple(rungs), best, rungs[-1].scores[best], sum(r.budget * len(r.scores) for r in rungs))


def scale_search(
    base: Weights,
    task_vector: Weights,
    score: Callable[[Mapping[str, Tensor], int], float],
    *,
    budgets: Sequence[int],
    alphas: Sequence[float] = ALPHAS,
    keep: float = 0.5,
) -> ScaleSearch:
    """Find the α of θ0 + α·τ with the best held-out `score(weights, budget)`; labels are the α as text.

    τ is any merged task vector: a sum of differences, TSV-Merge's, TIES's.
    """
    by_label = {repr(float(alpha)): float(alpha) for alpha in alphas}

    def scored(label: str, budget: int) -> float:
        return score(scaled(base, task_vector, by_label[label]), budget)

    return successive_halving(list(by_label), scored, budgets=budgets, keep=keep)


def scaled(base: Weights, task_vector: Weights, alpha: float) -> dict[str, Tensor]:
    """Return θ0 + α·τ; integer tensors, and tensors without a task vector, are the base's."""
    if unknown := next((name for name in task_vector if name not in base), None):
        raise InputError(f"the task vector changes {unknown!r}, which the base lacks{did_you_mean(unknown, base)}")
    moving = {name: value for name, value in base.items() if name in task_vector and value.is_floating_point()}
    moved = combine((moving, {name: task_vector[name] for name in moving}), (1.0, alpha))
    return {name: moved.get(name, value) for name, value in base.items()}
