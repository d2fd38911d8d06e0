"""The search space: variables, bounds, constraints, and the recipe of a genome.

A genome is a point of the unit cube, with one coordinate per variable. A parameter of the space becomes several
variables when it is searched per model, per group of tensors, or at several points of depth (between which it is
interpolated):

    weight.math                 the weight of the model math
    weight.math.attention       … for the tensors of the group attention
    weight.math.attention[2]    … at the third of its control points over depth
    density                     one value for all models
    weight.split                the layer from which weight.math[1], … hold instead of weight.math[0], …
    layers[5]                   what stands at the sixth place of the stack: code-1, the layer before of the model code
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from merganser.errors import InputError, did_you_mean
from merganser.evolve.arrays import Array
from merganser.evolve.layering import LAYERS, stack_layers

Value: TypeAlias = "float | int | str | bool"
Values: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True)
class Range:
    """Numbers in [low, high].

    Args:
        low: The smallest value.
        high: The largest value.
        integer: Whole numbers only.
        log: Spread values evenly in the logarithm.

    Example:
        >>> domain = mg.evolve.Range(0.1, 1.0)
    """

    low: float
    high: float
    integer: bool = False
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise InputError(f"a range goes from low to a higher high, not from {self.low} to {self.high}")
        if self.integer and (self.low != int(self.low) or self.high != int(self.high)):
            raise InputError(f"a range of whole numbers has whole ends, not {self.low} and {self.high}")
        if self.log and (self.low <= 0 or self.integer):
            raise InputError("a logarithmic range is of real numbers and starts above 0")

    def decode(self, u: float) -> Value:
        if self.integer:
            count = int(self.high) - int(self.low) + 1
            return int(self.low) + min(int(u * count), count - 1)
        if self.log:
            return float(min(max(self.low * (self.high / self.low) ** u, self.low), self.high))
        return float(min(max(self.low + u * (self.high - self.low), self.low), self.high))

    def encode(self, value: Value) -> float:
        if isinstance(value, (str, bool)) or not self.low <= value <= self.high:
            raise InputError(f"{value!r} is not between {self.low} and {self.high}")
        if self.integer:
            return (int(value) - int(self.low) + 0.5) / (int(self.high) - int(self.low) + 1)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Choices:
    """One of several values.

    Args:
        options: The values.

    Example:
        >>> domain = mg.evolve.Choices(("ties", "tsv"))
    """

    options: tuple[Value, ...]

    def __post_init__(self) -> None:
        if len(self.options) < 2 or len(set(map(repr, self.options))) < len(self.options):
            raise InputError(f"choices are two or more different values, not {list(self.options)}")

    def decode(self, u: float) -> Value:
        return self.options[min(int(u * len(self.options)), len(self.options) - 1)]

    def encode(self, value: Value) -> float:
        for index, option in enumerate(self.options):
            if type(option) is type(value) and option == value:
                return (index + 0.5) / len(self.options)
        raise InputError(f"{value!r} is not one of {list(self.options)}")


@dataclass(frozen=True)
class SearchParameter:
    """A hyper-parameter under search. It may be `method`, with a choice of methods as domain.

    Args:
        name: The parameter of the method.
        domain: Its values.
        models: Labels of the models with their own values; by default all share one value.
        groups: Names of groups -> globs over tensor names, each with its own value.
        points: The number of control points over depth.
        split: The number of layers, to search two values and the layer at which the second begins; 0: one value.

    Example:
        >>> weight = mg.evolve.SearchParameter("weight", mg.evolve.Range(0, 1.5), models=("math", "code"))
    """

    name: str
    domain: Range | Choices
    models: tuple[str, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    points: int = 1
    split: int = 0

    def __post_init__(self) -> None:
        if self.points < 1:
            raise InputError(f"{self.name}: {self.points} control points over depth; at least 1")
        if self.name == LAYERS:
            if self.models or self.groups or self.split or isinstance(self.domain, Range):
                raise InputError(f"{LAYERS}: a choice of layers for every place of the stack, and nothing else")
        elif self.split and (self.points > 1 or self.split < 3):
            raise InputError(f"{self.name}: a split over 3 layers or more, without control points over depth")
        elif (self.points > 1 or self.split) and (isinstance(self.domain, Choices) or self.domain.integer):
            raise InputError(f"{self.name}: only real numbers can be interpolated over depth")
        if len(set(self.groups.values())) < len(self.groups):
            raise InputError(f"{self.name}: two groups have the same glob, but a tensor has only one value")
        if self.name == "method" and (self.models or self.groups or isinstance(self.domain, Range)):
            raise InputError("method: is one choice for the whole merge; per-tensor methods belong in overrides")


@dataclass(frozen=True)
class Variable:
    """One coordinate of a genome: the part of a parameter that it sets."""

    parameter: SearchParameter
    model: str | None = None
    group: str | None = None
    point: int | None = None
    split: bool = False

    @property
    def domain(self) -> Range | Choices:
        return Range(1, self.parameter.split - 1, integer=True) if self.split else self.parameter.domain

    @property
    def name(self) -> str:
        if self.split:
            return f"{self.parameter.name}.split"
        parts = [self.parameter.name, *(part for part in (self.model, self.group) if part is not None)]
        return ".".join(parts) + ("" if self.point is None else f"[{self.point}]")


@dataclass(frozen=True)
class Constraint:
    """Σ coefficient · variable ≤ bound."""

    text: str
    coefficients: Mapping[str, float]
    bound: float

    def least(self, variables: Mapping[str, Range | Choices]) -> float:
        """Return the smallest Σ coefficient · variable over the box of the ranges."""
        ranges = [(c, domain) for name, c in self.coefficients.items() if isinstance(domain := variables[name], Range)]
        return math.fsum(min(c * domain.low, c * domain.high) for c, domain in ranges)

    def violation(self, values: Values) -> float:
        """Return by how much the constraint is violated; at most 0 if it holds."""
        return math.fsum(c * float(values[name]) for name, c in self.coefficients.items()) - self.bound


@dataclass(frozen=True)
class Space:
    """Parameters under search, and constraints on them.

    Args:
        parameters: The parameters.
        constraints: Linear inequalities such as `weight.math + 2 * weight.code <= 1.5`.

    Example:
        >>> density = mg.evolve.SearchParameter("density", mg.evolve.Range(0.1, 1))
        >>> space = mg.evolve.Space((density,), ("density <= 0.8",))
    """

    parameters: tuple[SearchParameter, ...]
    constraints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.parameters:
            raise InputError("the search space is empty")
        names = [variable.name for variable in self.variables]
        if len(set(names)) < len(names):
            raise InputError(f"{next(n for n in names if names.count(n) > 1)} is in the search space twice")
        _ = self.inequalities

    @cached_property
    def variables(self) -> tuple[Variable, ...]:
        found: list[Variable] = []
        for parameter in self.parameters:
            count = 2 if parameter.split else parameter.points
            found += [
                Variable(parameter, model, group, point)
                for model in parameter.models or (None,)
                for group in parameter.groups or (None,)
                for point in (range(count) if count > 1 else (None,))
            ]
            found += [Variable(parameter, split=True)] if parameter.split else []
        return tuple(found)

    @cached_property
    def inequalities(self) -> tuple[Constraint, ...]:
        known = {v.name: v.domain for v in self.variables}
        return tuple(parse_constraint(text, known) for text in self.constraints)

    def decode(self, genome: Array) -> dict[str, Value]:
        """The values a genome stands for, by name of variable."""
        return {v.name: v.domain.decode(float(u)) for v, u in zip(self.variables, genome, strict=True)}

    def encode(self, values: Values) -> Array:
        """Return a genome with these values."""
        for name in values:
            if name not in {v.name for v in self.variables}:
                raise InputError(f"no variable {name!r}{did_you_mean(name, (v.name for v in self.variables))}")
        if missing := [v.name for v in self.variables if v.name not in values]:
            raise InputError(f"values for {', '.join(missing)} are missing")
        return np.array([v.domain.encode(values[v.name]) for v in self.variables])

    def violations(self, values: Values) -> Array:
        return np.array([inequality.violation(values) for inequality in self.inequalities], dtype=np.float64)

    def recipe(self, template: Mapping[str, Any], labels: Sequence[str], values: Values) -> dict[str, Any]:
        """Return `template` (a native recipe, with models in the order of `labels`) with the values set.

        Values over depth become gradient lists, values per group a choice by glob, the template's value for the rest;
        chosen layers become slices.
        When the method is searched, parameters that the chosen one does not know are left out.
        """
        document: dict[str, Any] = {**template, "models": [dict(model) for model in template["models"]]}
        document["parameters"] = dict(template.get("parameters") or {})
        known = None
        if "method" in values:
            from merganser.methods.registry import lookup
            from merganser.methods.registry import parameters as declared

            document["method"] = values["method"]
            known = set(declared(lookup(str(values["method"]))))
        for parameter in self.parameters:
            if parameter.name in ("method", LAYERS) or (known is not None and parameter.name not in known):
                continue
            for model in parameter.models or (None,):
                target = document["parameters"] if model is None else document["models"][labels.index(model)]
                target[parameter.name] = self._setting(parameter, model, values, target.get(parameter.name))
        picks = [str(values[v.name]) for v in self.variables if v.parameter.name == LAYERS]
        return stack_layers(document, labels, picks) if picks else document

    def _setting(self, parameter: SearchParameter, model: str | None, values: Values, default: Any) -> Any:
        def over_depth(group: str | None) -> Any:
            if parameter.split:
                first, second = (values[Variable(parameter, model, group, p).name] for p in range(2))
                start = int(values[Variable(parameter, split=True).name])
                return [first] * start + [second] * (parameter.split - start)
            if parameter.points == 1:
                return values[Variable(parameter, model, group).name]
            return [values[Variable(parameter, model, group, p).name] for p in range(parameter.points)]

        if not parameter.groups:
            return over_depth(None)
        cases = {glob: over_depth(group) for group, glob in parameter.groups.items()}
        if default is not None and not isinstance(default, Mapping):
            cases.setdefault("*", default)
        return cases


def key(values: Values) -> str:
    """Return a cache key that is equal for equal values."""
    return json.dumps(dict(values), sort_keys=True, separators=(",", ":"))


_TERM = re.compile(r"\s*([+-]?)\s*(?:(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(?:\*\s*)?)?([A-Za-z_][\w.\-]*(?:\[\d+\])?)?")


def parse_constraint(text: str, variables: Mapping[str, Range | Choices]) -> Constraint:
    """Parse a linear inequality: terms like `2 * weight.math`, and numbers, on both sides of <= or >=."""
    sides = re.split(r"<=|>=", text)
    if len(sides) != 2 or "=" in text.replace("<=", "").replace(">=", "") or "<" in sides[0] or ">" in sides[1]:
        raise InputError(f"constraint {text!r}: expected one <= or >= between linear terms, as in 'a + 2 * b <= 1'")
    sign = 1.0 if "<=" in text else -1.0
    coefficients: dict[str, float] = {}
    bound = 0.0
    for side, factor in zip(sides, (sign, -sign), strict=True):
        for name, amount in _terms(side, text):
            if name is None:
                bound -= factor * amount
                continue
            if name not in variables:
                raise InputError(f"constraint {text!r}: no variable {name!r}{did_you_mean(name, variables)}")
            if isinstance(variables[name], Choices):
                raise InputError(f"constraint {text!r}: {name!r} is a choice, not a number")
            coefficients[name] = coefficients.get(name, 0.0) + factor * amount
    if not any(coefficients.values()):
        raise InputError(f"constraint {text!r} does not depend on any variable")
    constraint = Constraint(text, coefficients, bound)
    if constraint.least(variables) > bound:
        raise InputError(f"constraint {text!r}: no values of the space satisfy it")
    return constraint


def _terms(side: str, text: str) -> list[tuple[str | None, float]]:
    found: list[tuple[str | None, float]] = []
    position = 0
    while position < len(side.rstrip()):
        match = _TERM.match(side, position)
        if match is None or (match[2] is None and match[3] is None) or (found and not match[1]):
            raise InputError(f"constraint {text!r}: cannot read {side[position:].strip()!r}")
        amount = float(match[2] or 1) * (-1 if match[1] == "-" else 1)
        found.append((match[3], amount))
        position = match.end()
    if not found:
        raise InputError(f"constraint {text!r}: one side is empty")
    return found
