"""The initial population: the merges that everyone would try, so that no search ends below them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merganser.errors import InputError
from merganser.evolve.domains import Choices, Value
from merganser.evolve.layering import LAYERS
from merganser.evolve.space import Space, Variable, key
from merganser.methods.registry import lookup
from merganser.methods.registry import parameters as declared

#: Neutral values of parameters.
NEUTRAL = {"density": 1.0, "scale": 1.0, "lambda": 1.0, "epsilon": 0.0}


def initial_population(
    space: Space, method: str, parameters: Mapping[str, Any], most: int
) -> tuple[dict[str, Value], ...]:
    """Return the endpoints, the base, the uniform merge and plain task arithmetic, as far as the space contains them.

    Args:
        space: The search space; it contains them if it searches `weight`.
        method: The merging method, unless the space searches it.
        parameters: Parameters of the merge that are fixed.
        most: The maximum number to return.

    Returns:
        Values of all variables, one mapping per merge, inside the constraints.

    Example:
        >>> space = Space({"weight": SearchParameter(0, 1, per="model")}, models=("a", "b"))
        >>> initial_population(space, "linear", {}, 1)
        ({'weight.a': 1.0, 'weight.b': 0.0},)
    """
    labels = space.models
    if LAYERS in space.parameters:
        alone: list[dict[str, Value]] = [{v.name: f"{label}+0" for v in space.variables} for label in labels]
        return tuple(alone[:most])
    if "weight" not in space.parameters:
        return ()
    uniform = 1 / max(len(labels), 1)
    wanted: list[dict[str | None, float]] = []
    if space.parameters["weight"].per == "model":
        wanted += [{label: float(label == chosen) for label in labels} for chosen in labels]
    wanted.append(dict.fromkeys([*labels, None], uniform))
    if lookup(method).base == "required":
        wanted += [dict.fromkeys([*labels, None], weight) for weight in (1.0, 0.0)]
    found: dict[str, dict[str, Value]] = {}
    for weights in wanted:
        values = {v.name: _value(v, weights, method, parameters) for v in space.variables}
        try:
            space.encode(values)
        except InputError:
            continue
        if all(violation <= 0 for violation in space.violations(values)):
            found.setdefault(key(values), values)
    return tuple(found.values())[:most]


def _value(variable: Variable, weights: Mapping[str | None, float], method: str, fixed: Mapping[str, Any]) -> Value:
    """Return the weight of a model; for other parameters the neutral, fixed or default value, or the middle."""
    name, domain = variable.parameter, variable.domain
    if variable.split:
        return domain.decode(0.5)
    if name == "weight":
        return weights[variable.model]
    known = declared(lookup(method))
    options = [NEUTRAL.get(name), fixed.get(name), method if name == "method" else None]
    options += [known[name].default] if name in known else []
    for option in options:
        try:
            if isinstance(option, (int, float, str, bool)):
                domain.encode(option)
                return option
        except InputError:
            continue
    return domain.options[0] if isinstance(domain, Choices) else domain.decode(0.5)
