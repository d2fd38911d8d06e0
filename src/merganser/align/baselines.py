"""Other ways to align n models in one space, with the same result type as C²M³."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from merganser.align.ascent import Ascent, Step
from merganser.align.assignments import Assignments
from merganser.align.initialisation import hard_placing
from merganser.align.matching import match
from merganser.align.objective import inner
from merganser.align.permutations import identity
from merganser.align.placements import HardImage
from merganser.align.solver import hard_placement, layout_and_weights, objective_of, solve
from merganser.align.state import check_models, states_of
from merganser.align.symmetries import Symmetry
from merganser.align.universes import Universe
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError, one_of


def merge_many(
    models: Sequence[Reference],
    symmetry: Symmetry,
    *,
    method: str = "weights",
    seed: int = 0,
    max_passes: int = 100,
    workers: int | None = None,
) -> Universe:
    """Match each model in turn, in random order, to the mean of the others (MergeMany of Git Re-Basin).

    Every match runs to convergence; passes end when one changes nothing. The common space is where the models end up.

    Args:
        models: The models.
        symmetry: The symmetry of the architecture, from `mg.align.symmetry`.
        method: How to match a model to the mean: `"weights"` (coordinate ascent, as published) or `"frank_wolfe"`.
        seed: The seed of the order.
        max_passes: The maximum number of passes over all models.
        workers: Threads; one per core by default.

    Returns:
        The universe.

    Example:
        >>> universe = mg.align.merge_many(models, mg.align.symmetry(models[0], images))
    """
    one_of("method", method, ("weights", "frank_wolfe"))
    states = states_of(models, symmetry, least=2)
    layout, weights = layout_and_weights(symmetry, states)
    placement = hard_placement(layout, weights, [identity(symmetry)] * len(states))
    ascent = Ascent(placement, [identity(symmetry)] * len(states), Assignments(workers))
    generator = np.random.default_rng(seed)
    trace = [Step("start", placement.objective())]
    for _ in range(max_passes):
        gain = 0.0
        for model in map(int, generator.permutation(len(states))):
            if method == "frank_wolfe":
                gain += _match_to_mean(ascent, model)
                continue
            while moved := ascent.sweep((model, str(root)) for root in generator.permutation(list(layout.trees))):
                gain += moved
        if gain == 0.0:
            break
        placement.refresh()
        trace.append(Step("merge_many", placement.objective()))
    return Universe(symmetry, tuple(states), tuple(ascent.permutations), trace[-1].objective, tuple(trace))


def _match_to_mean(ascent: Ascent, model: int) -> float:
    """Match one model to the mean of the others by Frank-Wolfe from where it is; return the gain in f."""
    placement = ascent.placement
    layout, image = placement.layout, placement.images[model]
    others = [placement.rest(model, term) for term in range(len(layout.terms))]
    mean = [total / (len(placement.images) - 1) for total in others]
    here = [identity(layout.symmetry), ascent.permutations[model]]
    solved = solve(layout, [mean, image.weights], held=frozenset({0}), start=here, workers=ascent.assignments.workers)
    moved = HardImage(layout, image.weights, hard_placing(layout, solved.permutations[1])).full
    gain = sum(inner(new - old, other) for new, old, other in zip(moved, image.full, others, strict=True))
    if gain <= ascent.least_gain:
        return 0.0
    for root in layout.trees:
        ascent.set(model, root, solved.permutations[1])
    return gain


def match_to_reference(
    models: Sequence[Reference], symmetry: Symmetry, reference: int = 0, *, method: str = "weights", **options: Any
) -> Universe:
    """Match every model to one of them, whose space becomes the universe.

    The result is cycle-consistent too, but depends on the choice of the reference. Its notes name matches that look
    like local optima.

    Args:
        models: The models.
        symmetry: The symmetry of the architecture, from `mg.align.symmetry`.
        reference: The index of the reference.
        method: How to match; see `match`.
        **options: Further options of `match`.

    Returns:
        The universe in the space of the reference.

    Example:
        >>> universe = mg.align.match_to_reference(models, mg.align.symmetry(models[0], images))
    """
    check_models(models)
    models = list(models)
    if not isinstance(reference, int) or not 0 <= reference < len(models):
        raise InputError(f"reference {reference} is not one of the {len(models)} models, which count from 0")
    states = states_of(models, symmetry, least=2)
    permutations, notes = [], []
    for model in range(len(models)):
        if model == reference:
            permutations.append(identity(symmetry))
            continue
        found = match(models[reference], models[model], symmetry, method=method, **options)
        permutations.append(found.permutations)
        if found.note is not None:
            notes.append(f"model {model} to model {reference}: {found.note}")
    objective = objective_of(states, permutations, symmetry)
    return Universe(symmetry, tuple(states), tuple(permutations), objective, notes=tuple(notes))
