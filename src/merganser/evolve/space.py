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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from merganser.errors import InputError, did_you_mean
from merganser.evolve.arrays import Array
from merganser.evolve.domains import Choices, Range, Value, Values
from merganser.evolve.layering import LAYERS, layer_options, stack_layers
from merganser.evolve.schema import SettingError, StudyRecord


@dataclass(frozen=True)
class SearchParameter(StudyRecord):
    """A hyper-parameter under search. It may be `method`, with a choice of methods.

    Args:
        low: The smallest value.
        high: The largest value.
        integer: Whole numbers only.
        log: Spread values evenly in the logarithm.
        choices: The values, instead of a range.
        per: `"model"` for a value of each model, `"merge"` for one of all.
        groups: Names of groups -> globs over tensor names, each with its own value.
        points: The number of control points over depth, or `"layers"` for one in every layer.
        split: Search two values, and the layer at which the second begins.
        reach: For the parameter `layers`: how far off a layer may come from. Nothing else is set then.

    Example:
        >>> weight = mg.evolve.SearchParameter(0, 1.5, per="model")
        >>> method = mg.evolve.SearchParameter(choices=("ties", "tsv"))
    """

    low: float | None = None
    high: float | None = None
    integer: bool = False
    log: bool = False
    choices: tuple[bool | int | float | str, ...] | None = None
    per: Literal["model", "merge"] = "merge"
    groups: Mapping[str, str] = field(default_factory=dict)
    points: int | Literal["layers"] = 1
    split: bool = False
    reach: int | None = None

    def __post_init__(self) -> None:
        if self.reach is not None:
            bounded = (self.low, self.high, self.choices) != (None, None, None) or self.integer or self.log
            if self.reach < 0 or bounded or self.per == "model" or self.groups or self.points != 1 or self.split:
                raise SettingError("needs reach, how far off a layer may come from (0 or more), and nothing else")
            return
        if self.points != "layers" and self.points < 1:
            raise SettingError(f"{self.points} control points over depth; at least 1")
        if self.split and self.points != 1:
            raise SettingError("a split has no control points over depth")
        domain = self.domain
        if (self.points != 1 or self.split) and (isinstance(domain, Choices) or domain.integer):
            raise SettingError("only real numbers can be interpolated over depth")
        if len(set(self.groups.values())) < len(self.groups):
            raise SettingError("two groups have the same glob, but a tensor has only one value")

    @cached_property
    def domain(self) -> Range | Choices:
        """Return the values of the parameter; for `layers`, they depend on the models."""
        if self.choices is not None:
            if self.low is not None or self.high is not None:
                raise SettingError("give either choices, or low and high")
            return Choices(self.choices)
        if self.low is None or self.high is None:
            raise SettingError("needs low and high, or choices")
        return Range(self.low, self.high, self.integer, self.log)

    @property
    def needs_depth(self) -> bool:
        """Return whether its variables depend on the number of layers."""
        return self.points == "layers" or self.split or self.reach is not None


@dataclass(frozen=True)
class Variable:
    """One coordinate of a genome: the part of a parameter that it sets."""

    parameter: str
    domain: Range | Choices
    model: str | None = None
    group: str | None = None
    point: int | None = None
    split: bool = False

    @property
    def name(self) -> str:
        if self.split:
            return f"{self.parameter}.split"
        parts = [self.parameter, *(part for part in (self.model, self.group) if part is not None)]
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
        parameters: The parameters by name.
        constraints: Linear inequalities such as `weight.math + 2 * weight.code <= 1.5`.
        models: Labels of the models.
        depth: The number of layers, for parameters that need it.

    Raises:
        SettingError: If a parameter or a constraint is impossible.

    Example:
        >>> space = mg.evolve.Space({"density": mg.evolve.SearchParameter(0.1, 1)}, ("density <= 0.8",))
    """

    parameters: Mapping[str, SearchParameter]
    constraints: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    depth: int = 0

    def __post_init__(self) -> None:
        if not self.parameters:
            raise SettingError("space: is empty; name a parameter to search")
        for name, parameter in self.parameters.items():
            if name == LAYERS and parameter.reach is None:
                raise SettingError(f"space.{LAYERS}: needs reach, how far off a layer may come from, and nothing else")
            if name != LAYERS and parameter.reach is not None:
                raise SettingError(f"space.{name}: reach: only for the parameter {LAYERS!r}")
            if parameter.needs_depth and self.depth < (3 if parameter.split else 1):
                raise SettingError(f"space.{name}: needs models with more layers, not {self.depth}")
            if parameter.per == "model" and not self.models:
                raise SettingError(f"space.{name}: has a value per model, and no models are named")
            if name == "method" and (parameter.choices is None or parameter.per == "model" or parameter.groups):
                raise SettingError(
                    "space.method: is one choice for the whole merge; per-tensor methods belong in overrides"
                )
        names = [variable.name for variable in self.variables]
        if len(set(names)) < len(names):
            raise SettingError(f"{next(n for n in names if names.count(n) > 1)} is in the search space twice")
        _ = self.inequalities

    @cached_property
    def variables(self) -> tuple[Variable, ...]:
        found: list[Variable] = []
        for name, parameter in self.parameters.items():
            layers = parameter.points == "layers" or name == LAYERS
            count = 2 if parameter.split else self.depth if layers else int(parameter.points)
            domain = parameter.domain if name != LAYERS else Choices(layer_options(self.models, parameter.reach or 0))
            found += [
                Variable(name, domain, model, group, point)
                for model in self._models(parameter)
                for group in parameter.groups or (None,)
                for point in (range(count) if count > 1 else (None,))
            ]
            if parameter.split:
                found.append(Variable(name, Range(1, self.depth - 1, integer=True), split=True))
        return tuple(found)

    def _models(self, parameter: SearchParameter) -> tuple[str | None, ...]:
        return self.models if parameter.per == "model" else (None,)

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

    def recipe(self, template: Mapping[str, Any], values: Values) -> dict[str, Any]:
        """Return `template` (a native recipe, with the models in their order) with the values set.

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
        for name, parameter in self.parameters.items():
            if name in ("method", LAYERS) or (known is not None and name not in known):
                continue
            for model in self._models(parameter):
                target = document["parameters"] if model is None else document["models"][self.models.index(model)]
                target[name] = self._setting(name, model, values, target.get(name))
        picks = [str(values[v.name]) for v in self.variables if v.parameter == LAYERS]
        return stack_layers(document, self.models, picks) if picks else document

    def _setting(self, name: str, model: str | None, values: Values, default: Any) -> Any:
        """Return the value of a parameter in a recipe: of a model, or of all."""
        parameter = self.parameters[name]

        def over_depth(group: str | None) -> Any:
            own = [v for v in self.variables if (v.parameter, v.model, v.group, v.split) == (name, model, group, False)]
            found = [values[variable.name] for variable in own]
            if parameter.split:
                start = int(values[f"{name}.split"])
                return [found[0]] * start + [found[1]] * (self.depth - start)
            return found if len(found) > 1 else found[0]

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
