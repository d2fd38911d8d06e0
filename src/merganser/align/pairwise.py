"""Pairwise matching from weights alone: coordinate ascent (Git Re-Basin) and Frank-Wolfe on the same objective."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from torch import Tensor

from merganser.align.ascent import Ascent, Step
from merganser.align.assignments import Assignments
from merganser.align.frank_wolfe import FrankWolfe
from merganser.align.head_spectra import place_heads
from merganser.align.initialisation import Start
from merganser.align.matches import Match, Try, reaches
from merganser.align.objective import inner
from merganser.align.permutations import Permutations, identity
from merganser.align.propagation import propagate
from merganser.align.solver import hard_placement, layout_and_weights, solve
from merganser.align.state import states_of
from merganser.align.symmetries import Symmetry
from merganser.align.terms import TermLayout
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError, one_of

STARTS = ("propagate", "spectra", "identity")
FIRST = frozenset({0})


def weight_matching(
    a: Reference,
    b: Reference,
    symmetry: Symmetry,
    *,
    start: str | Permutations = "propagate",
    tries: int = 2,
    seed: int = 0,
    max_sweeps: int = 100,
    workers: int | None = None,
) -> Match:
    """Match by coordinate ascent (Git Re-Basin): one tree at a time, in random order, until a sweep gains nothing.

    Args:
        start: The start of the first try: "propagate" places the layers beside pinned axes first and continues from
            there (see `propagation`), "spectra" matches attention heads by their singular values first (see
            `head_spectra`), "identity" is the published algorithm; or your own permutations.
        tries: Maximum number of runs; those after the first start at the identity, each in its own order. The best is
            kept. A try that reaches the bound of the objective ends the search.
        seed: The seed of the first try's order; the others use the following seeds.
        max_sweeps: Maximum sweeps per try.
        workers: The number of threads for nested assignments.
    """
    if not isinstance(tries, int) or tries < 1:
        raise InputError(f"tries must be a whole number of at least 1, got {tries!r}")
    if isinstance(start, str):
        one_of("start", start, STARTS)
    layout, weights = layout_and_weights(symmetry, states_of([a, b], symmetry))
    bound = pair_bound(weights)
    runs: list[tuple[Permutations, list[Step]]] = []
    ended: list[Try] = []
    for run in range(tries):
        begin, clock = start if run == 0 else "identity", perf_counter()
        runs.append(_ascend(layout, weights, begin, seed + run, max_sweeps, workers))
        label = begin if isinstance(begin, str) else "given"
        ended.append(Try(label, seed + run, runs[-1][1][-1].objective, perf_counter() - clock))
        if reaches(ended[-1].objective, bound):
            break
    best = max(range(len(ended)), key=lambda run: ended[run].objective)
    permutations, trace = runs[best]
    return Match(symmetry, permutations, ended[best].objective, tuple(trace), tuple(ended), bound)


def _ascend(
    layout: TermLayout,
    weights: Sequence[Sequence[Tensor]],
    start: str | Permutations,
    seed: int,
    max_sweeps: int,
    workers: int | None,
) -> tuple[Permutations, list[Step]]:
    """Run one try; return its permutations and its trace."""
    still = identity(layout.symmetry)
    permutations = [still, still if isinstance(start, str) else start]
    placement = hard_placement(layout, weights, permutations, held=FIRST)
    ascent = Ascent(placement, permutations, Assignments(workers))
    trace = [Step("start", placement.objective())]
    if start == "propagate":
        propagate(ascent, 1)
        trace = [Step("propagate", placement.objective())]
    elif start == "spectra":
        place_heads(ascent, weights)
        propagate(ascent, 1, placed=[root for root, tree in layout.trees.items() if tree.children])
        trace = [Step("spectra", placement.objective())]
    generator = np.random.default_rng(seed)
    for _ in range(max_sweeps):
        if ascent.sweep((1, str(root)) for root in generator.permutation(list(layout.trees))) == 0.0:
            break
        placement.refresh()
        trace.append(Step("weights", placement.objective()))
    return ascent.permutations[1], trace


def pair_bound(weights: Sequence[Sequence[Tensor]]) -> float:
    """Return Σ ‖W_a‖‖W_b‖ over the terms, an upper bound of the objective (Cauchy–Schwarz)."""
    first, second = weights
    return float(sum((inner(v, v) * inner(w, w)) ** 0.5 for v, w in zip(first, second, strict=True)))


def frank_wolfe_matching(
    a: Reference,
    b: Reference,
    symmetry: Symmetry,
    *,
    start: str | Permutations = "identity",
    starts: int = 1,
    seed: int = 0,
    solver: FrankWolfe | None = None,
    workers: int | None = None,
) -> Match:
    """Run Frank-Wolfe on all trees at once (the thesis' pairwise algorithm); deterministic unless the start is
    random.
    """
    layout, weights = layout_and_weights(symmetry, states_of([a, b], symmetry))
    begin: Start = start if isinstance(start, str) else [identity(symmetry), start]
    solved = solve(layout, weights, held=FIRST, start=begin, starts=starts, seed=seed, solver=solver, workers=workers)
    found = (symmetry, solved.permutations[1], solved.objective, tuple(solved.trace), tuple(solved.tries))
    return Match(*found, pair_bound(weights))
