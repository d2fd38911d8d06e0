"""Choose how to store many tensors under one byte budget, by the largest error reduction per byte."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from merganser.lazy import np

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class Option(NamedTuple):
    """One way to store a tensor: its bytes, the remaining error, and its name."""

    nbytes: int
    error: float
    name: str


Curve: TypeAlias = Sequence[Option]


def hull(options: Iterable[Option]) -> list[Option]:
    """Return the lower convex hull of options over their bytes, starting with the smallest.

    Every step along it lowers the error, and by less per byte than the step before. For any price of a byte, an option
    off the hull is beaten by one on it.

    Args:
        options: Ways to store one thing.

    Returns:
        The options on the hull.

    Example:
        >>> [option.name for option in hull([Option(0, 9, "a"), Option(1, 8, "b"), Option(2, 1, "c")])]
        ['a', 'c']
    """
    found: list[Option] = []
    for option in sorted(options):
        if found and option.error >= found[-1].error:
            continue
        while len(found) > 1 and _slope(found[-2], found[-1]) >= _slope(found[-1], option):
            found.pop()
        found.append(option)
    return found


def choose(curves: Sequence[Curve], budget: int) -> list[Option]:
    """Choose one option of every curve to minimise the error with at most `budget` bytes in all.

    Greedy along the convex hulls. Until the first step that it cannot afford, the choice is optimal for its bytes; the
    rest of the budget goes to later steps that fit, and finally to options off the hulls.

    Args:
        curves: The options of each tensor; the smallest ones must fit.
        budget: Bytes for all of them.

    Returns:
        The chosen option of each.

    Example:
        >>> curves = [[Option(0, 5, "none"), Option(4, 1, "half")], [Option(0, 3, "none"), Option(4, 2, "half")]]
        >>> [option.name for option in choose(curves, 6)]
        ['half', 'none']
    """
    hulls = [hull(curve) for curve in curves]
    steps = [(i, a, b) for i, each in enumerate(hulls) for a, b in pairwise(each)]
    purse = budget - sum(each[0].nbytes for each in hulls)
    value = np.array([-_slope(a, b) for _, a, b in steps])
    cost = np.array([b.nbytes - a.nbytes for _, a, b in steps], dtype=np.int64)
    owner = np.array([i for i, _, _ in steps], dtype=np.int64)
    taken = buy(value, cost, owner, len(hulls), purse)
    chosen = [each[count] for each, count in zip(hulls, taken, strict=True)]
    left = budget - sum(option.nbytes for option in chosen)
    for index in sorted(range(len(chosen)), key=lambda i: -chosen[i].error):
        own = chosen[index]
        fitting = [option for option in curves[index] if own.nbytes <= option.nbytes <= own.nbytes + left]
        chosen[index] = min(fitting, key=lambda option: (option.error, option.nbytes))
        left -= chosen[index].nbytes - own.nbytes
    return chosen


def buy(value: Floats, cost: Integers, owner: Integers, owners: int, purse: int) -> list[int]:
    """Return how many steps of each owner to take, by value per byte, within a budget.

    Args:
        value: The value per byte of each step; the steps of one owner are in order of decreasing value.
        cost: Bytes of each step.
        owner: The owner of each step.
        owners: The number of owners.
        purse: Bytes to spend.
    """
    taken = np.zeros(owners, dtype=np.int64)
    order = np.argsort(-value, kind="stable")  # stable: the steps of one owner stay in order among equals
    affordable = int(np.searchsorted(np.cumsum(cost[order]), purse, side="right"))
    np.add.at(taken, owner[order[:affordable]], 1)
    purse -= int(cost[order[:affordable]].sum())
    closed: set[int] = set()
    for step in order[affordable:]:
        who = int(owner[step])
        if who in closed or cost[step] > purse:
            closed.add(who)
            if len(closed) == owners:
                break
            continue
        taken[who] += 1
        purse -= int(cost[step])
    return [int(n) for n in taken]


@dataclass(frozen=True)
class Mode:
    """A way to store one tensor of all experts: a shared part, and the curves of each expert's residual."""

    curves: Mapping[str, Curve]
    shared: Option = field(default=Option(0, 0.0, ""))


def choose_modes(modes: Mapping[str, Sequence[Mode]], budget: int) -> dict[str, Mode]:
    """Choose a mode for every tensor, by the price of a byte at which the budget is just spent.

    At a price λ a mode costs λ · shared bytes + Σ_t min (error + λ · bytes), and every tensor takes its cheapest mode.
    The price is the lowest at which all of them fit, found by bisection.

    Args:
        modes: The modes of each tensor; the first shares nothing.
        budget: Bytes for all of them.

    Returns:
        The mode of each tensor.
    """
    hulls = {
        tensor: [[hull(curve) for curve in mode.curves.values()] for mode in several]
        for tensor, several in modes.items()
    }

    def at(price: float) -> tuple[dict[str, Mode], int]:
        found, size = {}, 0
        for tensor, several in modes.items():
            costs = []
            for mode, curves in zip(several, hulls[tensor], strict=True):
                best = [min(curve, key=lambda option: option.error + price * option.nbytes) for curve in curves]
                cost = sum(option.error + price * option.nbytes for option in [*best, mode.shared])
                costs.append((cost, mode.shared.nbytes + sum(option.nbytes for option in best)))
            index = min(range(len(costs)), key=lambda i: costs[i][0])
            found[tensor] = several[index]
            size += costs[index][1]
        return found, size

    low, high = 1e-30, 1e30
    for _ in range(100 if any(len(several) > 1 for several in modes.values()) else 0):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle)[1] <= budget else (middle, high)
    return at(high)[0]


def _slope(a: Option, b: Option) -> float:
    """Return the error per byte from a to b, negative if b is better."""
    return (b.error - a.error) / (b.nbytes - a.nbytes)
