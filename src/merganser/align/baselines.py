"""Other ways to put n models in one space, with the same result type as C²M³."""

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
    """MergeMany (Git Re-Basin): match each model in turn, in random order, to the mean of the others.

    Every match is weight matching to convergence; passes end when one changes nothing. The common space is
    wherever the models end up.
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
    """Match every model to one of them, whose space becomes the universe: consistent too, but the choice matters.

    The `notes` of the result are those of its matches that look like local optima.
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
