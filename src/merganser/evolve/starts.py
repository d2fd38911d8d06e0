"""Obvious first merges, which belong in the first population so that no search ends below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from merganser.errors import InputError
from merganser.evolve.layering import LAYERS
from merganser.evolve.space import Choices, SearchParameter, Space, Value, key
from merganser.methods.registry import lookup
from merganser.methods.registry import parameters as declared

#: Neutral values of parameters.
NEUTRAL = {"density": 1.0, "scale": 1.0, "lambda": 1.0, "epsilon": 0.0}


def starting_values(
    space: Space, method: str, labels: Sequence[str], parameters: Mapping[str, Any], most: int
) -> tuple[dict[str, Value], ...]:
    """Return the endpoints, the base, the uniform merge and plain task arithmetic, as far as the space contains them.

    Args:
        space: The search space; it contains them if it searches `weight`.
        method: The merging method, unless the space searches it.
        labels: The endpoints.
        parameters: Parameters of the merge that are fixed.
        most: The maximum number to return.

    Returns:
        Values of all variables, one mapping per merge, inside the constraints.

    Example:
        >>> starting_values(Space((Parameter("weight", Range(0, 1)),)), "linear", ["a", "b"], {}, 4)  # doctest: +SKIP
    """
    if any(parameter.name == LAYERS for parameter in space.parameters):
        alone: list[dict[str, Value]] = [{v.name: f"{label}+0" for v in space.variables} for label in labels]
        return tuple(alone[:most])
    if not any(parameter.name == "weight" for parameter in space.parameters):
        return ()
    uniform = 1 / max(len(labels), 1)
    wanted: list[dict[str | None, float]] = []
    if any(parameter.name == "weight" and parameter.models for parameter in space.parameters):
        wanted += [{label: float(label == chosen) for label in labels} for chosen in labels]
    wanted.append(dict.fromkeys([*labels, None], uniform))
    if lookup(method).base == "required":
        wanted += [dict.fromkeys([*labels, None], weight) for weight in (1.0, 0.0)]
    found: dict[str, dict[str, Value]] = {}
    for weights in wanted:
        values = {
            v.name: v.domain.decode(0.5) if v.split else _value(v.parameter, v.model, weights, method, parameters)
            for v in space.variables
        }
        try:
            space.encode(values)
        except InputError:
            continue
        if all(violation <= 0 for violation in space.violations(values)):
            found.setdefault(key(values), values)
    return tuple(found.values())[:most]


def _value(
    parameter: SearchParameter,
    model: str | None,
    weights: Mapping[str | None, float],
    method: str,
    fixed: Mapping[str, Any],
) -> Value:
    """Return the weight of a model; for other parameters the neutral, fixed or default value, or the middle."""
    if parameter.name == "weight":
        return weights[model]
    known = declared(lookup(method))
    options = [NEUTRAL.get(parameter.name), fixed.get(parameter.name)]
    options += [method] if parameter.name == "method" else []
    options += [known[parameter.name].default] if parameter.name in known else []
    for option in options:
        try:
            if isinstance(option, (int, float, str, bool)):
                parameter.domain.encode(option)
                return option
        except InputError:
            continue
    return parameter.domain.options[0] if isinstance(parameter.domain, Choices) else parameter.domain.decode(0.5)
