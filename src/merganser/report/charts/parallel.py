"""Parallel coordinates: one vertical axis per variable, one line per trial, stronger for better trials."""

from __future__ import annotations

from collections.abc import Sequence

from merganser.report.charts.axes import Axis
from merganser.report.charts.frame import frame, tooltip


def parallel_coordinates(
    columns: Sequence[str], rows: Sequence[Sequence[float | str]], scores: Sequence[float], *, caption: str = ""
) -> str:
    """Return one line per row across one axis per column.

    Args:
        columns: The names of the variables.
        rows: For each trial its value of every variable; texts are placed in order of appearance.
        scores: For each trial its score; a higher one is drawn stronger and later.
        caption: A sentence below the chart.

    Example:
        >>> parallel_coordinates(["weight", "density"], [[0.2, 0.5], [0.6, 0.9]], [0.71, 0.84])
    """
    places = [_column([row[i] for row in rows]) for i in range(len(columns))]
    across = [100 * (i + 0.5) / len(columns) for i in range(len(columns))]
    low, high = min(scores, default=0.0), max(scores, default=1.0)
    marks = [f'<path class="grid" d="M{x:.2f} 0V100"/>' for x in across]
    for number in sorted(range(len(rows)), key=lambda i: scores[i]):
        share = (scores[number] - low) / (high - low) if high > low else 1.0
        path = "M" + "L".join(f"{x:.2f} {100 - column[number]:.2f}" for x, column in zip(across, places, strict=True))
        values = ", ".join(f"{name} {_shown(value)}" for name, value in zip(columns, rows[number], strict=True))
        marks.append(
            f'<path class="line" style="--own:var(--c0)" stroke-opacity="{0.1 + 0.9 * share**2:.2f}" d="{path}">'
            f"{tooltip(f'{values}: {scores[number]:.4g}')}</path>"
        )
    ends = [_ends([row[i] for row in rows]) for i in range(len(columns))]
    return frame(
        "".join(marks),
        label=f"{len(rows)} trials over {', '.join(columns)}; scores from {low:.4g} to {high:.4g}",
        names=[f"{name} ({end})" for name, end in zip(columns, ends, strict=True)],
        caption=f"{caption} Stronger lines have higher scores ({low:.4g} to {high:.4g}).".strip(),
        lines="",
    )


def _column(values: Sequence[float | str]) -> list[float]:
    names = {value: float(i) for i, value in enumerate(dict.fromkeys(v for v in values if isinstance(v, str)))}
    numbers = [names[value] if isinstance(value, str) else float(value) for value in values]
    axis = Axis.around(numbers)
    return [axis.place(number) for number in numbers]


def _ends(values: Sequence[float | str]) -> str:
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return f"{len({str(value) for value in values})} values"
    return f"{min(numbers, default=0):.3g}–{max(numbers, default=0):.3g}"


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
