"""Heat maps: a value per row and column as the strength of a colour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from merganser.excerpts import shorten
from merganser.report.charts.axes import Tick
from merganser.report.charts.frame import frame, tooltip

#: Levels of a colour: cells of one level are one path, which keeps pages small.
_LEVELS = 12
_MOST_NAMES = 28
#: Letters of column names that fit beside each other on a phone, and on a wide page; more are written upright.
_ACROSS, _WIDE = 36, 96


def heat_map(
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    low: float | None = None,
    high: float | None = None,
    log: bool = False,
    x: str = "",
    y: str = "",
    points: Mapping[str, tuple[float, float]] | None = None,
    caption: str = "",
) -> str:
    """Return a heat map. Negative values are drawn in another colour than positive ones.

    Args:
        values: One number per row and column; cells that are not finite stay empty.
        rows: The names of the rows, from the top. Fewer names than rows are spread evenly over them.
        columns: The names of the columns.
        low: The value without colour, by default 0, or the least one on a logarithmic scale.
        high: The value with the full colour, by default the largest in magnitude.
        log: Whether the scale is logarithmic.
        x: The title of the horizontal axis.
        y: The title of the vertical axis.
        points: Places to mark, by name: (across, down), both as shares of the picture.
        caption: A sentence below the chart.

    Example:
        >>> heat_map([[1.0, -0.2], [-0.2, 1.0]], ["math", "code"], ["math", "code"])
    """
    flat = [v for row in values for v in row if math.isfinite(v) and (not log or v > 0)]
    bottom = (min(flat, default=1.0) if log else 0.0) if low is None else low
    top = max((abs(v) for v in flat), default=1.0) if high is None else high
    height, width = len(values), max(map(len, values), default=0)
    cells: dict[tuple[str, int], list[str]] = {}
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if math.isfinite(value) and (level := round(_LEVELS * _share(value, bottom, top, log))) > 0:
                cells.setdefault(("cold" if value < 0 else "hot", level), []).append(f"M{j} {i}h1v1h-1z")
    marks = "".join(
        f'<path fill="var(--{colour})" fill-opacity="{level / _LEVELS:.2f}" d="{"".join(path)}"/>'
        for (colour, level), path in sorted(cells.items())
    )
    stretched = f'<g transform="scale({100 / max(1, width):.6f} {100 / max(1, height):.6f})">{marks}</g>'
    signed = any(v < 0 for v in flat)
    least = -top if signed else bottom
    scale = f"Colours from {least:.3g} to {top:.3g}{', logarithmic' if log else ''}."
    marked = points or {}
    letters = sum(len(tick.text) + 2 for tick in _place_names(columns))
    return frame(
        stretched + '<path fill="none" stroke="var(--line)" d="M0 0H100V100H0z"/>' + _draw_points(marked),
        label=f"{height} by {width} values. {scale} {' '.join(marked)}".strip(),
        xs=_place_names(columns),
        ys=[Tick(100 - tick.place, tick.text) for tick in _place_names(rows)],
        x=x,
        y=y,
        upright="always" if letters > _WIDE else "narrow" if letters > _ACROSS else "",
        caption=f"{caption} {scale}".strip(),
        height=min(30.0, max(6.0, 1.5 * height)),
        lines="",
        scale=(f"{least:.3g}", f"{top:.3g}", signed),
    )


def _draw_points(points: Mapping[str, tuple[float, float]]) -> str:
    return "".join(
        f'<path class="point" d="M{100 * across:.2f} {100 * down:.2f}h0">{tooltip(name)}</path>'
        for name, (across, down) in points.items()
    )


def _share(value: float, low: float, high: float, log: bool) -> float:
    """Return the position of a value between `low` and `high`, from 0 to 1."""
    if log:
        low, high, value = (math.log(v) if v > 0 else -math.inf for v in (low, high, value))
    else:
        value = abs(value)
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else float(value >= high)


def _place_names(names: Sequence[str]) -> list[Tick]:
    """Return names spread evenly, thinned out if there are many."""
    every = math.ceil(len(names) / _MOST_NAMES) or 1
    return [Tick(100 * (i + 0.5) / len(names), shorten(name, 28)) for i, name in enumerate(names) if i % every == 0]
