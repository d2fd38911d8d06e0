"""Dot plots: one row per name, with a dot at its value and a line over its interval. The axis need not start at
zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merganser.excerpts import shorten
from merganser.report.charts.axes import Axis, Tick, can_show
from merganser.report.charts.frame import frame, tooltip
from merganser.report.charts.style import own


@dataclass(frozen=True)
class Dot:
    """A value with its name, and its interval if known."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    series: int = 0

    def __str__(self) -> str:
        around = "" if self.low is None or self.high is None else f" ({self.low:.4g} to {self.high:.4g})"
        return f"{self.name}: {self.value:.4g}{around}"


def dot_plot(
    dots: Sequence[Dot],
    x: str = "",
    *,
    legend: Sequence[str] = (),
    guide: float | None = None,
    log: bool = False,
    caption: str = "",
) -> str:
    """Return a dot plot; several dots of one name share a row.

    Args:
        dots: The dots, the first on top.
        x: The title of the axis.
        legend: The names of the series that the dots belong to.
        guide: A value to compare with, drawn as a dashed line.
        log: Whether the scale is logarithmic.
        caption: A sentence below the chart.

    Example:
        >>> dot_plot([Dot("ties", 0.81, 0.79, 0.83), Dot("tsv", 0.88, 0.86, 0.9)], "accuracy")
    """
    names = list(dict.fromkeys(dot.name for dot in dots))
    values = [v for dot in dots for v in (dot.value, dot.low, dot.high)]
    axis = Axis.around([*values, guide], log=log)
    places = {name: 100 * (i + 0.5) / len(names) for i, name in enumerate(names)}
    marks = [] if guide is None else [f'<path class="guide" d="M{axis.place(guide):.2f} 0V100"/>']
    for dot in [dot for dot in dots if can_show(dot.value, log)]:
        y = places[dot.name]
        said, colour = tooltip(str(dot)), own(dot.series)
        if dot.low is not None and dot.high is not None and can_show(dot.low, log) and can_show(dot.high, log):
            span = f"M{axis.place(dot.low):.2f} {y:.2f}H{axis.place(dot.high):.2f}"
            marks.append(f'<path class="range" {colour} d="{span}">{said}</path>')
        marks.append(f'<path class="dot" {colour} d="M{axis.place(dot.value):.2f} {y:.2f}h0">{said}</path>')
    return frame(
        "".join(marks),
        label=f"{x or 'Values'}: " + "; ".join(map(str, dots)),
        xs=axis.ticks(),
        ys=[Tick(100 - place, shorten(name, 28)) for name, place in places.items()],
        x=x,
        legend=legend,
        caption=caption,
        height=1.5 * len(names),
    )
