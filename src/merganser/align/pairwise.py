"""Pairwise matching from weights alone: coordinate ascent (Git Re-Basin) and Frank-Wolfe on the same objective."""

from __future__ import annotations

import numpy as np

from merganser.align.ascent import Ascent, Step
from merganser.align.frank_wolfe import FrankWolfe
from merganser.align.matches import Match
from merganser.align.permutations import Permutations, identity
from merganser.align.solver import hard_placement, layout_and_weights, solve
from merganser.align.starts import Start
from merganser.align.state import Model, states_of
from merganser.align.symmetries import Symmetry

FIRST = frozenset({0})


def weight_matching(
    a: Model,
    b: Model,
    symmetry: Symmetry,
    *,
    start: Permutations | None = None,
    seed: int = 0,
    max_sweeps: int = 100,
    workers: int | None = None,
) -> Match:
    """Git Re-Basin: one tree at a time in an order drawn anew for every sweep, until a sweep gains nothing."""
    layout, weights = layout_and_weights(symmetry, states_of([a, b], symmetry))
    permutations = [identity(symmetry), start or identity(symmetry)]
    placement = hard_placement(layout, weights, permutations, held=FIRST)
    ascent = Ascent(placement, permutations, workers)
    generator = np.random.default_rng(seed)
    trace = [Step("start", placement.objective())]
    for _ in range(max_sweeps):
        if ascent.sweep((1, str(root)) for root in generator.permutation(list(layout.trees))) == 0.0:
            break
        placement.refresh()
        trace.append(Step("weights", placement.objective()))
    return Match(symmetry, ascent.permutations[1], trace[-1].objective, tuple(trace))


def frank_wolfe_matching(
    a: Model,
    b: Model,
    symmetry: Symmetry,
    *,
    start: str | Permutations = "identity",
    starts: int = 1,
    seed: int = 0,
    solver: FrankWolfe | None = None,
    workers: int | None = None,
) -> Match:
    """Frank-Wolfe on all trees at once (the thesis' pairwise algorithm); deterministic unless the start is random."""
    layout, weights = layout_and_weights(symmetry, states_of([a, b], symmetry))
    begin: Start = start if isinstance(start, str) else [identity(symmetry), start]
    solved = solve(layout, weights, held=FIRST, start=begin, starts=starts, seed=seed, solver=solver, workers=workers)
    return Match(symmetry, solved.permutations[1], solved.objective, tuple(solved.trace))
