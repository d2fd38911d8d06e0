"""Numbers as they are read in a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.answers import Score


def percent(value: float | None, places: int = 1) -> str:
    return "–" if value is None or math.isnan(value) else _positive_zero(f"{100 * value:.{places}f}")


def signed(points: float, places: int = 1) -> str:
    """A difference with its sign, which zero does not have."""
    text = f"{points:+.{places}f}"
    return text if float(text) else text[1:]


def points(difference: Score) -> str:
    """A difference of accuracies with its standard error, in bold beyond two of them."""
    text = f"{signed(100 * difference.mean)} ± {percent(difference.error)}"
    return f"**{text}**" if difference.clear else text


def lead(difference: Score) -> str:
    """A difference of accuracies with its standard error, in bold if it is positive beyond two of them."""
    return points(difference) if difference.mean > 0 else points(difference).strip("*")


def _positive_zero(text: str) -> str:
    return text if float(text) else text.removeprefix("-")


def amount(value: float) -> str:
    """Three significant places, however large."""
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rounding(value: float) -> str:
    """An error of rounding, which may be none."""
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.2g}"


def spread(values: Sequence[float], places: int = 1) -> str:
    """Mean ± standard deviation over runs, in percent."""
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return f"{percent(mean, places)} ± {percent(deviation, places)}"


def error_of(accuracy: float, answers: int) -> float:
    """One standard error of an accuracy over so many answers."""
    return math.sqrt(accuracy * (1 - accuracy) / answers)


def standard_error(accuracy: float, answers: int) -> str:
    """Of an accuracy over so many answers, in points."""
    return percent(error_of(accuracy, answers))


def against(gap: float, around: float) -> str:
    """A difference in standard errors."""
    if abs(gap) <= around:
        return "within one standard error"
    return "more than one standard error, less than two" if abs(gap) <= 2 * around else "more than two standard errors"


def number(value: object) -> str:
    """Any value: three significant places, no more than the reader can use."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if math.isnan(value):
            return "–"
        if value == 0 or 1e-3 <= abs(value) < 1e4:
            return _positive_zero(f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}")
        return f"{value:.2e}"
    return str(value)


def mebibytes(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"


def seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def marked(cells: Sequence[str], best: int) -> list[str]:
    """The cells with the best one in bold."""
    return [f"**{cell}**" if position == best else cell for position, cell in enumerate(cells)]


def series(words: Sequence[str]) -> str:
    """Join words as a sentence does: `a, b and c`."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def between(values: Sequence[float], places: int = 1) -> str:
    """The range of the values."""
    low, high = f"{min(values):.{places}f}", f"{max(values):.{places}f}"
    return low if low == high else f"{low} to {high}"
