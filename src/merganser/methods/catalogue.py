"""Every method as rows of text, for `merganser methods` and the documentation."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from merganser.methods.base import Method
from merganser.methods.parameters import Parameter
from merganser.methods.registry import lookup, parameters, registry


@dataclass(frozen=True)
class ParameterRow:
    """The description of a hyper-parameter."""

    name: str
    default: str
    help: str
    per_model: bool
    bounds: str
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class MethodRow:
    """The description of a method; `description` is its formula and paper."""

    name: str
    summary: str
    base: str
    models: str
    reach: str
    statistics: tuple[str, ...]
    also: tuple[str, ...]
    parameters: tuple[ParameterRow, ...]
    description: str

    @property
    def cost(self) -> str:
        """What the method does with a tensor, in words."""
        return COSTS.get(self.reach, self.reach)


#: What a method does with a tensor, by its reach.
COSTS = {
    "elementwise": "one pass over the weights",
    "reduce_map": "two passes over the weights",
    "whole": "whole tensors at a time",
}


def catalogue() -> list[MethodRow]:
    """Return all methods, sorted by name."""
    return [describe(method) for method in registry().values()]


def describe(method: type[Method] | str) -> MethodRow:
    """Return the description of a method, given as class or name."""
    cls = lookup(method) if isinstance(method, str) else method
    return MethodRow(
        name=cls.name,
        summary=cls.summary,
        base=cls.base,
        models=_range(*cls.models),
        reach=cls.reach,
        statistics=cls.statistics,
        also=cls.also,
        parameters=tuple(_row(parameter) for parameter in parameters(cls).values()),
        description=inspect.cleandoc(cls.__doc__ or ""),
    )


def _row(parameter: Parameter) -> ParameterRow:
    if parameter.choices:
        bounds = " | ".join(parameter.choices)
    elif parameter.low is not None or parameter.high is not None:
        low = "" if parameter.low is None else f"{parameter.low:g}"
        high = "" if parameter.high is None else f"{parameter.high:g}"
        bounds = f"{low} … {high}".strip()
    else:
        bounds = ""
    return ParameterRow(
        name=parameter.name,
        default="required" if parameter.required else show_value(parameter.default),
        help=parameter.help,
        per_model=parameter.per_model,
        bounds=bounds,
        aliases=parameter.aliases,
    )


def show_value(value: Any) -> str:
    """Return a default as recipes and tables write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _range(low: float, high: float) -> str:
    if low == high:
        return f"{low:g}"
    return f"{low:g}+" if high == float("inf") else f"{low:g}–{high:g}"
