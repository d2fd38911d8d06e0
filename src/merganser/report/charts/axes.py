"""Axes: map values to positions in percent, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: Magnitudes that a chart can show.
_SMALLEST, _LARGEST = 1e-100, 1e100


def can_show(value: float, log: bool = False) -> bool:
    """Return whether a value can be shown on an axis: finite, of a reasonable magnitude, and positive if `log`."""
    return abs(value) <= _LARGEST and (not log or value >= _SMALLEST)


@dataclass(frozen=True)
class Tick:
    """A position on an axis in percent of its length, and its label."""

    place: float
    text: str


@dataclass(frozen=True)
class Axis:
    """The range of values that an axis shows, on a linear or a logarithmic scale; with ticks at `whole` numbers only,
    for counts.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @classmethod
    def around(cls, values: Iterable[float | None], *, log: bool = False) -> Axis:
        """Return an axis that shows all finite values (all positive ones if `log`) with a small margin."""
        shown = [value for value in values if value is not None and can_show(value, log)]
        if not shown:
            return cls(0.1, 1.0, log) if log else cls(0.0, 1.0)
        low, high = min(shown), max(shown)
        if log:
            room = max(1.2, (high / low) ** 0.05)
            return cls(low / room, high * room, True)
        size = max(abs(low), abs(high))
        room = 0.05 * (high - low if high - low > 1e-9 * size else size) if size > _SMALLEST else 1.0
        return cls(low - room, high + room)

    def place(self, value: float) -> float:
        """Return the position of a value, in percent from the low end."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return 100 * (at - low) / (high - low)

    def ticks(self, count: int = 5) -> list[Tick]:
        """Return about `count` ticks at round values."""
        values = self._decades(count) if self.log else self._steps(count)
        return [Tick(self.place(value), text) for value, text in values]

    def _steps(self, count: int) -> list[tuple[float, str]]:
        step = round_step((self.high - self.low) / count)
        if self.whole:
            step = max(1.0, step if step.is_integer() else 2 * step)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        if round(step * 10**decimals, 6) != round(step * 10**decimals):
            decimals += 1  # steps of 2.5
        return [(i * step, number(i * step, decimals)) for i in range(first, last + 1)]

    def _decades(self, count: int) -> list[tuple[float, str]]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first < 1:  # less than two decades: round values within
            powers = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
            within = [(value, f"{value:g}") for value in powers if self.low <= value <= self.high]
            return within if len(within) > 2 else self._steps(count)
        every = max(1, math.ceil((last - first + 1) / count))
        return [(10.0**e, f"{10.0**e:g}") for e in range(first, last + 1, every)]


def round_step(step: float) -> float:
    """Return the smallest round number (1, 2, 2.5 or 5 times a power of ten) that is at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= step * (1 - 1e-9))


def number(value: float, decimals: int) -> str:
    """Return a value with thousands separators, or in powers of ten if that is shorter."""
    if abs(value) >= 1e6:
        return f"{value:g}"
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", "−")
