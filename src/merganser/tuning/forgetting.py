"""Avoid forgetting: score the path from base to expert (WiSE-FT) on both, and choose a point."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from merganser.errors import InputError
from merganser.modules.functional import Weights, combine
from merganser.plain import Result

_DEFAULT = tuple(i / 10 for i in range(11))


@dataclass(frozen=True)
class ForgettingPath(Result):
    """Scores at (1 − λ)θ0 + λθ_t for every λ: on what the base knew (`kept`) and on the expert's task (`learned`)."""

    positions: tuple[float, ...]
    kept: tuple[float, ...]
    learned: tuple[float, ...]
    take: float
    """The chosen λ, by `rule`."""
    rule: str


def forgetting_path(
    base: Weights,
    expert: Weights,
    *,
    kept: Callable[[Weights], float],
    learned: Callable[[Weights], float],
    positions: Sequence[float] = _DEFAULT,
    tolerance: float | None = None,
) -> ForgettingPath:
    """Score the path from the base to an expert with two functions, and choose a point on it.

    Without a tolerance, the point has the largest sum of two shares, (kept(λ) − kept(1)) / (kept(0) − kept(1)) and
    (learned(λ) − learned(0)) / (learned(1) − learned(0)); a share with a non-positive denominator does not count. Ties
    go to the smaller λ, closer to the base. A point with a score of NaN is never chosen.

    Args:
        base: The weights θ_0 before fine-tuning.
        expert: The weights θ_t after it.
        kept: Scores weights on what the base knew; higher is better.
        learned: Scores weights on the expert's task; higher is better.
        positions: The points λ to score, rising from 0 to 1.
        tolerance: Choose the best `learned` among the points whose `kept` is at most this much below the base's.

    Returns:
        The scores of all points, and the chosen one.

    Raises:
        InputError: If the positions do not rise from 0 to 1, or one of the ends has no score.
    """
    if list(positions) != sorted(set(positions)) or positions[0] != 0 or positions[-1] != 1:
        raise InputError(f"positions must rise from 0 to 1, got {list(positions)}")
    before, after = [], []
    for x in positions:
        weights = combine((base, expert), (1 - x, x))
        before.append(float(kept(weights)))
        after.append(float(learned(weights)))
    if not all(map(math.isfinite, (before[0], before[-1], after[0], after[-1]))):
        raise InputError(
            f"the base and the expert must have scores: kept {before[0]} and {before[-1]}, learned {after[0]} and "
            f"{after[-1]}"
        )
    if tolerance is None:
        at_stake, to_gain = before[0] - before[-1], after[-1] - after[0]
        values = [
            ((k - before[-1]) / at_stake if at_stake > 0 else 0.0) + ((n - after[0]) / to_gain if to_gain > 0 else 0.0)
            for k, n in zip(before, after, strict=True)
        ]
        rule = "largest sum of the shares kept and learned"
    else:
        allowed = before[0] - tolerance
        values = [n if k >= allowed else -float("inf") for k, n in zip(before, after, strict=True)]
        rule = f"best learned with kept at most {tolerance:g} below the base"
    take = positions[max(range(len(values)), key=lambda i: (values[i], -i))]
    return ForgettingPath(tuple(positions), tuple(before), tuple(after), float(take), rule)
