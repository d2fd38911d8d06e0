"""Hyper-parameters of rules, and their declaration as fields."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any

from merganser.errors import RecipeError


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter for recipes, the command line and the documentation."""

    default: Any
    help: str
    required: bool
    per_model: bool = False
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] | None = None
    #: Names of the parameter in other tools.
    aliases: tuple[str, ...] = ()
    #: The default in a mergekit recipe.
    mergekit: Any = None
    #: Derived from the field that declares the parameter.
    name: str = ""
    kind: type = float

    def check(self, value: Any, where: str) -> Any:
        """Return the value in its own type, or raise an error that names the place."""
        if self.choices is not None:
            if value not in self.choices:
                raise RecipeError(f"{where}: {value!r} is not one of {', '.join(map(repr, self.choices))}")
            return value
        if self.kind is bool:
            if not isinstance(value, bool) and value not in (0, 1):
                raise RecipeError(f"{where}: expected true or false, got {value!r}")
            return bool(value)
        if self.kind is tuple:
            if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
                raise RecipeError(f"{where}: expected a list of strings, got {value!r}")
            return tuple(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RecipeError(f"{where}: expected a number, got {value!r}")
        if not abs(value) <= sys.float_info.max:
            found = repr(value) if isinstance(value, float) else "an integer that no float can hold"
            raise RecipeError(f"{where}: expected a finite number, got {found}")
        if self.kind is int and value != int(value):
            raise RecipeError(f"{where}: expected a whole number, got {value!r}")
        low, high = self.low, self.high
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"at most {high}" if low is None else f"in [{low}, {high}]"
            raise RecipeError(f"{where}: {value!r} is out of bounds, must be {bounds}")
        return self.kind(value)


def param(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
    mergekit: Any = None,
) -> Any:
    """Declare a hyper-parameter; without a default it is required.

    `aliases` are names in other tools, and `mergekit` is the default there if it differs.
    """
    required = default is dataclasses.MISSING
    declared = Parameter(
        None if required else default,
        help,
        required,
        low=low,
        high=high,
        choices=choices,
        aliases=aliases,
        mergekit=mergekit,
    )
    return field(default=default, metadata={"parameter": declared})


def per_model(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    aliases: tuple[str, ...] = (),
    mergekit: Any = None,
) -> Any:
    """Declare a hyper-parameter with one value per model; the field holds a tuple."""
    required = default is dataclasses.MISSING
    declared = Parameter(
        None if required else default, help, required, True, low=low, high=high, aliases=aliases, mergekit=mergekit
    )
    return field(default=(), metadata={"parameter": declared})
