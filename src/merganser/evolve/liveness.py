"""Check that every variable of a search has an effect; one without would only dilute the search.

Checked by planning, not by matching globs: a variable is alive if changing it alone changes the plan of the merge. That
covers groups that match no tensor or only tensors of earlier groups, overrides, bases, and points between layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from merganser import recipes
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.plan import Output
from merganser.errors import InputError
from merganser.evolve.domains import Values
from merganser.evolve.layering import LAYERS
from merganser.evolve.space import Space, Variable


def check(space: Space, template: Mapping[str, Any]) -> None:
    """Check that corners and middle of the space are valid recipes, the checkpoints fit, and every variable has an
    effect.
    """
    opened: dict[str, Checkpoint] = {}

    def open_once(reference: str) -> Checkpoint:
        if reference not in opened:
            opened[reference] = open_checkpoint(reference)
        return opened[reference]

    def outputs(values: Values) -> tuple[Output, ...]:
        plan = recipes.plan(recipes.load(space.recipe(template, values)), open=open_once)
        if nested := [model.label for model in plan.models if model.plan is not None]:
            raise InputError(f"{nested[0]}: a nested recipe cannot be evolved; merge it first and use the result")
        return plan.outputs

    middle = space.decode(np.full(len(space.variables), 0.5))
    for corner in (0.0, 1.0):
        recipes.load(space.recipe(template, space.decode(np.full(len(space.variables), corner))))
    low = space.decode(np.zeros(len(space.variables)))
    # Splits and stacks change every plan by their kind.
    dead = [v for v in space.variables if not v.split and v.parameter != LAYERS]
    for start in _sample_methods(space, middle):
        planned = outputs(start)
        dead = [v for v in dead if v.parameter != "method" and outputs({**start, v.name: low[v.name]}) == planned]
    for parameter in dict.fromkeys(variable.parameter for variable in dead):
        here = [variable for variable in dead if variable.parameter == parameter]
        names = ", ".join(variable.name for variable in here)
        raise InputError(f"space.{parameter}: no tensor depends on {names}: {_explain(here[0], space, template)}")


def _sample_methods(space: Space, middle: Values) -> list[dict[str, Any]]:
    """Return the middle of the space, once for every searched method."""
    if "method" not in space.parameters:
        return [dict(middle)]
    return [{**middle, "method": option} for option in space.parameters["method"].choices or ()]


def _explain(variable: Variable, space: Space, template: Mapping[str, Any]) -> str:
    base = template.get("base")
    if variable.model is not None and template["models"][space.models.index(variable.model)]["path"] == base:
        return f"{variable.model} is the base itself; leave it out of models"
    if variable.group is not None:
        glob = space.parameters[variable.parameter].groups[variable.group]
        return f"the glob {glob!r} matches none, or only tensors set by an earlier group or an override"
    if variable.point is not None:
        return "none is at that depth; use fewer points"
    return "overrides set it for all of them"
