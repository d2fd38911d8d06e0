"""Other ways to align n models in one space, with the same result type as C²M³."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from merganser.align.ascent import Ascent, Step
from merganser.align.matching import match
from merganser.align.permutations import identity
from merganser.align.solver import hard_placement, layout_and_weights, objective_of
from merganser.align.state import Model, check_models, states_of
from merganser.align.symmetries import Symmetry
from merganser.align.universes import Universe
from merganser.errors import InputError


def merge_many(
    models: Sequence[Model],
    symmetry: Symmetry,
    *,
    seed: int = 0,
    max_passes: int = 100,
    workers: int | None = None,
) -> Universe:
    """Match each model in turn, in random order, to the mean of the others (MergeMany of Git Re-Basin).

    Every match is weight matching to convergence; passes end when one changes nothing. The common space is where the
    models end up.

    Args:
        models: The models.
        symmetry: The symmetry of the architecture, from `mg.align.symmetry`.
        seed: The seed of the order.
        max_passes: The maximum number of passes over all models.
        workers: Threads; one per core by default.

    Returns:
        The universe.

    Example:
        >>> universe = mg.align.merge_many(models, mg.align.symmetry(models[0], images))
    """
    states = states_of(models, symmetry, least=2)
    layout, weights = layout_and_weights(symmetry, states)
    placement = hard_placement(layout, weights, [identity(symmetry)] * len(states))
    ascent = Ascent(placement, [identity(symmetry)] * len(states), workers)
    generator = np.random.default_rng(seed)
    trace = [Step("start", placement.objective())]
    for _ in range(max_passes):
        gain = 0.0
        for model in generator.permutation(len(states)):
            while moved := ascent.sweep((int(model), str(root)) for root in generator.permutation(list(layout.trees))):
                gain += moved
        if gain == 0.0:
            break
        placement.refresh()
        trace.append(Step("merge_many", placement.objective()))
    return Universe(symmetry, tuple(states), tuple(ascent.permutations), trace[-1].objective, tuple(trace))


def match_to_reference(
    models: Sequence[Model], symmetry: Symmetry, reference: int = 0, *, method: str = "weights", **options: Any
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
