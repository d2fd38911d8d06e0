"""Parallel coordinates: one vertical axis per variable, one line per trial, stronger for better trials."""

from __future__ import annotations

from collections.abc import Sequence

from merganser.checkpoints.tensor_names import natural_order
from merganser.report.charts.axes import Axis
from merganser.report.charts.frame import frame, tooltip


def parallel_coordinates(
    columns: Sequence[str],
    rows: Sequence[Sequence[float | str]],
    scores: Sequence[float],
    *,
    lowest: bool = False,
    caption: str = "",
) -> str:
    """Return one line per row across one axis per column.

    Args:
        columns: The names of the variables.
        rows: For each trial its value of every variable; texts are placed in natural order.
        scores: For each trial its score; a better one is drawn stronger and later.
        lowest: Whether lower scores are better.
        caption: A sentence below the chart.

    Example:
        >>> parallel_coordinates(["weight", "density"], [[0.2, 0.5], [0.6, 0.9]], [0.71, 0.84])
    """
    places = [_place_values([row[i] for row in rows]) for i in range(len(columns))]
    across = [100 * (i + 0.5) / len(columns) for i in range(len(columns))]
    low, high = min(scores, default=0.0), max(scores, default=1.0)
    marks = [f'<path class="grid" d="M{x:.2f} 0V100"/>' for x in across]
    for number in sorted(range(len(rows)), key=lambda i: scores[i], reverse=lowest):
        share = (scores[number] - low) / (high - low) if high > low else 1.0
        share = 1 - share if lowest and high > low else share
        path = "M" + "L".join(f"{x:.2f} {100 - column[number]:.2f}" for x, column in zip(across, places, strict=True))
        values = ", ".join(f"{name} {_show(value)}" for name, value in zip(columns, rows[number], strict=True))
        marks.append(
            f'<path class="line" style="--own:var(--c0)" stroke-opacity="{0.1 + 0.9 * share**2:.2f}" d="{path}">'
            f"{tooltip(f'{values}: {scores[number]:.4g}')}</path>"
        )
    better = "lower" if lowest else "higher"
    ends = [_show_range([row[i] for row in rows]) for i in range(len(columns))]
    return frame(
        "".join(marks),
        label=f"{len(rows)} trials over {', '.join(columns)}; scores from {low:.4g} to {high:.4g}",
        names=[f"{name} ({end})" if end else name for name, end in zip(columns, ends, strict=True)],
        labels=[label for i, x in enumerate(across) for label in _label_values(x, [row[i] for row in rows], places[i])],
        caption=f"{caption} Stronger lines have {better} scores ({low:.4g} to {high:.4g}).".strip(),
        lines="",
    )


#: Values of a text variable that are named on its axis.
_NAMED = 8


def _order(values: Sequence[float | str]) -> list[str]:
    """Return the texts of a variable in natural order, the lowest first."""
    return sorted({_show(value) for value in values}, key=natural_order)


def _is_text(values: Sequence[float | str]) -> bool:
    return any(isinstance(value, str) for value in values)


def _place_values(values: Sequence[float | str]) -> list[float]:
    """Return the places of a variable's values, in percent from the low end."""
    names = {name: float(i) for i, name in enumerate(_order(values))} if _is_text(values) else {}
    numbers = [names[_show(value)] if names else float(value) for value in values]
    axis = Axis.around(numbers)
    return [axis.place(number) for number in numbers]


def _label_values(x: float, values: Sequence[float | str], column: Sequence[float]) -> list[tuple[float, float, str]]:
    """Return the names of a text variable beside its axis."""
    named = {_show(value): place for value, place in zip(values, column, strict=True)}
    texts = _is_text(values) and len(named) <= _NAMED
    return [(x, 100 - place, name) for name, place in named.items()] if texts else []


def _show_range(values: Sequence[float | str]) -> str:
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        names = {str(value) for value in values}
        return "" if len(names) <= _NAMED else f"{len(names)} values"
    return f"{min(numbers, default=0):.3g}–{max(numbers, default=0):.3g}"


def _show(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
