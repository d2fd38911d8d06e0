"""Activation matching: match units that respond similarly to the data.

For two models the profit of a tree is the correlation of its units, linear in the permutation, so that one (nested)
assignment is exact. For n models f = Σ_{p<q} ⟨P_p C_pq, P_q⟩ is maximised like the objective of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from merganser.align.ascent import Ascent, Step
from merganser.align.assignments import Assignments
from merganser.align.cross_moments import CrossMoments, cross_moments
from merganser.align.matches import Match
from merganser.align.permutations import Permutations, identity
from merganser.align.solver import Solved, hard_placement, layout_and_weights, solve
from merganser.align.state import State, states_of
from merganser.align.symmetries import Symmetry
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError
from merganser.kernels.assignment import assign_all
from merganser.modules.batches import InputsLike, reusable


def activation_matching(
    a: Reference,
    b: Reference,
    symmetry: Symmetry,
    *,
    batches: Iterable[InputsLike],
    standardize: bool = True,
    workers: int | None = None,
) -> Match:
    """Match units by the correlations of layer outputs on batches of inputs; targets are ignored.

    Without `standardize` units are matched by their cross-moments, as published with Git Re-Basin. That saves a pass
    over the batches, but units of large variance then outweigh all others, which costs narrow networks accuracy.

    Trees that no layer shows (such as queries and keys inside a fused attention) are matched by weights, with the
    others in place.
    """
    if not (isinstance(a, nn.Module) and isinstance(b, nn.Module)):
        raise InputError("activation matching runs both models: give modules, not weights")
    states = states_of([a, b], symmetry)
    moments = cross_moments([a, b], symmetry, reusable(batches, "batches"), standardize=standardize)
    return match_by_moments(moments, 1, states, workers)


def match_by_moments(moments: CrossMoments, other: int, states: Sequence[State], workers: int | None = None) -> Match:
    """Match one of the models that were measured to the first. `states` are the weights of these two."""
    symmetry = moments.symmetry
    seen = sorted({path[0] for path in moments.grams})
    sizes = {path: tuple(symmetry.atoms[atom].size for atom in path) for path in moments.grams}
    profits = {path: moments.pair(path, 0, other).cpu().numpy().reshape(size * 2) for path, size in sizes.items()}
    problems = [(symmetry.trees[root], {p: v for p, v in profits.items() if p[0] == root}) for root in seen]
    permutations = identity(symmetry)
    for solution, _ in assign_all(problems, workers):
        permutations |= solution
    found, objective = _match_unseen(states, symmetry, [identity(symmetry), permutations], seen, workers)
    return Match(symmetry, found[1], objective, (Step("activations", objective),))


def solve_by_activations(
    models: Sequence[Reference],
    states: Sequence[State],
    symmetry: Symmetry,
    batches: Iterable[InputsLike],
    *,
    standardize: bool,
    workers: int | None,
    **options: Any,
) -> Solved:
    """Return permutations of n models that maximise the summed cross-moments of all pairs; the objective is of the
    weights.
    """
    modules = [model for model in models if isinstance(model, nn.Module)]
    if len(modules) != len(models):
        raise InputError("a universe by activations runs the models: give modules, not weights")
    moments = cross_moments(modules, symmetry, reusable(batches, "batches"), standardize=standardize)
    solved = solve(*moments.factors(), workers=workers, **options)
    seen = {path[0] for path in moments.grams}
    permutations, objective = _match_unseen(states, symmetry, solved.permutations, seen, workers)
    return Solved(permutations, objective, [*solved.trace, Step("weights", objective)])


def _match_unseen(
    states: Sequence[State],
    symmetry: Symmetry,
    permutations: Sequence[Permutations],
    seen: Iterable[str],
    workers: int | None,
) -> tuple[list[Permutations], float]:
    """Match the trees that no layer shows by weights, with the others and the first model in place."""
    layout, weights = layout_and_weights(symmetry, states)
    placement = hard_placement(layout, weights, permutations, held=frozenset({0}))
    ascent = Ascent(placement, permutations, Assignments(workers))
    unseen = [root for root in layout.trees if root not in set(seen)]
    while ascent.sweep((model, root) for model in placement.free for root in unseen):
        pass
    return ascent.permutations, placement.objective()
