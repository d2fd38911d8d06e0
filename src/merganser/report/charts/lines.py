"""Line charts and scatter plots over two axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from merganser.report.charts.axes import Axis, Tick, can_show
from merganser.report.charts.frame import frame, tooltip
from merganser.report.charts.style import own

#: Names below a chart whose horizontal axis is a sequence of names.
_MOST_NAMES = 7


@dataclass(frozen=True)
class Series:
    """Points of one name. `xs` are numbers, or names of places in order; `faint` ones stay in the background.

    Series of one `group` share its colour, and the legend names the group.
    """

    name: str
    xs: Sequence[float] | Sequence[str]
    ys: Sequence[float | None]
    joined: bool = True
    dots: bool = True
    dotted: bool = False
    faint: bool = False
    group: str = ""

    @property
    def legend(self) -> str:
        return self.group or self.name


def line_chart(
    series: Sequence[Series],
    x: str = "",
    y: str = "",
    *,
    log_x: bool = False,
    log_y: bool = False,
    guides: Sequence[float] = (),
    include: Sequence[float] = (),
    caption: str = "",
) -> str:
    """Return lines, or separate points, over two axes.

    Args:
        series: The series, each in its own colour.
        x: The title of the horizontal axis.
        y: The title of the vertical axis.
        log_x: Whether the horizontal scale is logarithmic.
        log_y: Whether the vertical scale is logarithmic.
        guides: Values of y to compare with, drawn as dashed lines.
        include: Values that the vertical axis always includes, such as 0 and 1.
        caption: A sentence below the chart.

    Example:
        >>> line_chart([Series("loss", [0, 0.5, 1], [0.1, 0.9, 0.1])], "λ", "loss")
    """
    names = list(dict.fromkeys(p for s in series for p in s.xs if isinstance(p, str)))
    points = [_place_points(one, {name: float(i) for i, name in enumerate(names)}) for one in series]
    across = Axis.around([p for line in points for p, _ in line], log=log_x)
    across = replace(across, whole=all(isinstance(p, int) for s in series for p in s.xs))
    up = Axis.around([*(v for line in points for _, v in line), *guides, *include], log=log_y)
    marks = [f'<path class="guide" d="M0 {100 - up.place(g):.2f}H100"/>' for g in guides]
    legend = list(dict.fromkeys(one.legend for one in series))
    for one, line in zip(series, points, strict=True):
        i = legend.index(one.legend)
        drawn = [(p, v) for p, v in line if can_show(p, log_x) and can_show(v, log_y)]
        places = [(across.place(p), 100 - up.place(v)) for p, v in drawn]
        faint = " faint" if one.faint else ""
        if one.joined and len(places) > 1:
            path = "M" + "L".join(f"{a:.2f} {b:.2f}" for a, b in places)
            marks.append(f'<path class="line{" dotted" * one.dotted}{faint}" {own(i)} d="{path}"/>')
        if one.dots:
            said = [tooltip(f"{one.name}: {_show_place(p, names)}, {v:.4g}") for p, v in drawn]
            marks += [
                f'<path class="dot{faint}" {own(i)} d="M{a:.2f} {b:.2f}h0">{text}</path>'
                for (a, b), text in zip(places, said, strict=True)
            ]
    every = math.ceil(len(names) / _MOST_NAMES)
    ticks = [Tick(across.place(i), names[i]) for i in range(0, len(names), every)] if names else across.ticks()
    return frame(
        "".join(marks),
        label=_describe(series, points, x, y),
        xs=ticks,
        ys=up.ticks(),
        x=x,
        y=y,
        legend=legend,
        caption=caption,
        upright="narrow" if names else "",
    )


def _place_points(series: Series, order: Mapping[str, float]) -> list[tuple[float, float]]:
    """Return the points with a finite value; a name is at its position in the order."""
    xs = [order[x] if isinstance(x, str) else float(x) for x in series.xs]
    return [(x, y) for x, y in zip(xs, series.ys, strict=True) if y is not None and math.isfinite(y)]


def _show_place(place: float, names: Sequence[str]) -> str:
    return names[int(place)] if names else f"{place:.4g}"


def _describe(series: Sequence[Series], points: Sequence[Sequence[tuple[float, float]]], x: str, y: str) -> str:
    said = []
    for one, line in zip(series, points, strict=True):
        values = [value for _, value in line]
        if values:
            said.append(f"{one.name} from {min(values):.4g} to {max(values):.4g} in {len(values)} points")
    return f"{y or 'Values'} over {x or 'steps'}: {'; '.join(said) or 'nothing to show'}"
