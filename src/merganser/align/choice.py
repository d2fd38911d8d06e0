"""Choose among several universes by a score of the merge.

The objective has many optima. Near the best, a higher objective no longer means a better network: runs whose objectives
differ by 1 % may differ by ten points of accuracy, more than algorithms differ from each other. With a few batches to
score merges on, it pays to try several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from time import perf_counter

from merganser.align.baselines import merge_many
from merganser.align.state import State, states_of
from merganser.align.symmetries import Symmetry
from merganser.align.universes import Universe, universe
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError


@dataclass(frozen=True)
class UniverseCandidate:
    """One matching of the models: its objective, the score of its merge, and the seconds it took."""

    name: str
    objective: float
    score: float
    seconds: float


@dataclass(frozen=True)
class UniverseChoice:
    """The universe whose merge scored highest, and all candidates.

    Attributes:
        universe: The best universe.
        candidates: All candidates with their scores.

    Example:
        >>> symmetry = mg.align.symmetry(models[0], images)
        >>> choice = mg.align.choose_universe(models, symmetry, lambda state: -float(state["0.weight"].norm()))
        >>> best = choice.universe
    """

    universe: Universe
    candidates: tuple[UniverseCandidate, ...]


def choose_universe(
    models: Sequence[Reference],
    symmetry: Symmetry,
    score: Callable[[State], float],
    *,
    tries: int = 2,
    seed: int = 0,
    workers: int | None = None,
) -> UniverseChoice:
    """Match models in several ways and keep the result whose merge scores highest.

    Candidates are C²M³ from the propagated start and from the barycentre, and for each of `tries` seeds C²M³ from a
    random start and MergeMany in a random order.

    Args:
        models: Two or more models of one architecture.
        symmetry: Their symmetry.
        score: From the merged weights to a number, higher is better. Score the network as you will use it, after
            `repair` or `reset_batch_norm`, and not on the data you test on.
        tries: The number of seeds; 0 leaves the two starts without a seed.
        seed: The first seed.
        workers: The number of threads for the assignments.

    Returns:
        The universe chosen, and every candidate in the order tried.

    Raises:
        InputError: If a score is not a number, or the models do not fit the symmetry.

    Example:
        >>> choice = choose_universe(models, symmetry, score)  # doctest: +SKIP
        >>> choice.universe.merged()  # doctest: +SKIP
    """
    if not isinstance(tries, int) or tries < 0:
        raise InputError(f"tries must be a whole number of at least 0, got {tries!r}")
    states = states_of(models, symmetry, least=2)
    c2m3 = partial(universe, states, symmetry, workers=workers)
    ways: dict[str, Callable[[], Universe]] = {
        f"C²M³ from {start}": partial(c2m3, start=start) for start in ("propagate", "barycentre")
    }
    for own in range(seed, seed + tries):
        ways[f"C²M³ from sinkhorn, seed {own}"] = partial(c2m3, start="sinkhorn", seed=own)
        ways[f"MergeMany, seed {own}"] = partial(merge_many, states, symmetry, seed=own, workers=workers)
    candidates: list[UniverseCandidate] = []
    best: Universe | None = None
    for name, find in ways.items():
        clock = perf_counter()
        found = find()
        seconds, value = perf_counter() - clock, float(score(found.merged()))
        if isnan(value):
            raise InputError(f"the score of {name} is not a number")
        if best is None or value > max(one.score for one in candidates):
            best = found
        candidates.append(UniverseCandidate(name, found.objective, value, seconds))
    assert best is not None
    return UniverseChoice(best, tuple(candidates))
