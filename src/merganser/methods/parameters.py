"""What a rule's hyper-parameters are, and how a rule declares them as fields."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from merganser.errors import RecipeError


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter as recipes, the command line and the documentation see it."""

    default: Any
    help: str
    required: bool
    per_model: bool = False
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] | None = None
    #: Other tools' names for it.
    aliases: tuple[str, ...] = ()
    #: What a mergekit recipe means that leaves the parameter out.
    mergekit: Any = None
    #: Known from the field that declares it.
    name: str = ""
    kind: type = float

    def check(self, value: Any, where: str) -> Any:
        """The value in its own type, or an error that names the place."""
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
        if self.kind is int and value != int(value):
            raise RecipeError(f"{where}: expected a whole number, got {value!r}")
        if not math.isfinite(value):
            raise RecipeError(f"{where}: expected a finite number, got {value!r}")
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
    """A hyper-parameter; without a default it is required.

    `aliases` are other tools' names for it, `mergekit` its default there if it is another one.
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
    """A hyper-parameter with one value for each model; the field holds a tuple."""
    required = default is dataclasses.MISSING
    declared = Parameter(
        None if required else default, help, required, True, low=low, high=high, aliases=aliases, mergekit=mergekit
    )
    return field(default=(), metadata={"parameter": declared})
