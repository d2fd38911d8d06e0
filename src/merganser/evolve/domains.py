"""The values of a variable of a search: a range of numbers, or a choice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from merganser.errors import InputError
from merganser.evolve.schema import SettingError

Value: TypeAlias = "float | int | str | bool"
Values: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True)
class Range:
    """Numbers in [low, high]: whole ones only (`integer`), or spread evenly in the logarithm (`log`)."""

    low: float
    high: float
    integer: bool = False
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise SettingError(f"a range goes from low to a higher high, not from {self.low} to {self.high}")
        if self.integer and (self.low != int(self.low) or self.high != int(self.high)):
            raise SettingError(f"a range of whole numbers has whole ends, not {self.low} and {self.high}")
        if self.log and (self.low <= 0 or self.integer):
            raise SettingError("a logarithmic range is of real numbers and starts above 0")

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
    """One of several values."""

    options: tuple[Value, ...]

    def __post_init__(self) -> None:
        if len(self.options) < 2 or len(set(map(repr, self.options))) < len(self.options):
            raise SettingError(f"choices are two or more different values, not {list(self.options)}")

    def decode(self, u: float) -> Value:
        return self.options[min(int(u * len(self.options)), len(self.options) - 1)]

    def encode(self, value: Value) -> float:
        for index, option in enumerate(self.options):
            if type(option) is type(value) and option == value:
                return (index + 0.5) / len(self.options)
        raise InputError(f"{value!r} is not one of {list(self.options)}")
