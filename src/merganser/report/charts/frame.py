"""The common frame of charts: axes, grid, legend, caption, and a text alternative."""

from __future__ import annotations

import html
from collections.abc import Sequence

from merganser.report.charts.axes import Tick
from merganser.report.charts.style import own


def frame(
    marks: str,
    *,
    label: str,
    xs: Sequence[Tick] = (),
    ys: Sequence[Tick] = (),
    names: Sequence[str] = (),
    x: str = "",
    y: str = "",
    legend: Sequence[str] = (),
    caption: str = "",
    height: float = 16,
    lines: str = "xy",
    upright: str = "",
    scale: tuple[str, str, bool] | None = None,
    labels: Sequence[tuple[float, float, str]] = (),
) -> str:
    """Return a chart around its marks.

    Args:
        marks: SVG elements in a square of 100 × 100 whose origin is the upper left corner.
        label: The text alternative.
        xs: Ticks below the chart, from its left end.
        ys: Ticks left of the chart, from its lower end.
        names: Names below the chart in columns of equal width, in place of `xs`.
        x: The title of the horizontal axis.
        y: The title of the vertical axis.
        legend: The names of the series, in the order of their colours.
        caption: A sentence below the chart.
        height: The height of the plotting area in rem.
        lines: The axes whose ticks have grid lines: `x`, `y`, both or none.
        upright: When the labels of the horizontal axis are written upright: `always`, on `narrow` pages, or never.
        scale: The ends of a scale of colours, and whether it has a colour for negative values.
        labels: Texts inside the plotting area with their places: percent from the left, percent from the top.
    """
    grid = "".join(f'<path d="M{t.place:.2f} 0V100"/>' for t in xs if "x" in lines)
    grid += "".join(f'<path d="M0 {100 - t.place:.2f}H100"/>' for t in ys if "y" in lines)
    widest = max((t.text for t in ys), key=len, default="")
    parts = [
        f'<div class="y">{html.escape(y)}</div>' if y else "",
        f'<div class="ys" style="height:{height:g}rem"><i>{html.escape(widest)}</i>',
        *(f'<span style="top:{100 - t.place:.2f}%">{html.escape(t.text)}</span>' for t in ys),
        "</div>",
        f'<div class="area" style="height:{height:g}rem">',
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">',
        f'<g class="grid">{grid}</g>{marks}</svg>',
        *(f'<span style="left:{a:.2f}%;top:{b:.2f}%">{html.escape(text)}</span>' for a, b, text in labels),
        "</div>",
        f'<div class="xs{f" upright {upright}" if upright else ""}">' if xs else "",
        f"<i>{html.escape(max((t.text for t in xs), key=len, default=''))}</i>" if upright else "",
        *(f'<span style="left:{t.place:.2f}%">{html.escape(t.text)}</span>' for t in xs),
        "</div>" if xs else "",
        '<div class="names">' if names else "",
        *(f"<span>{html.escape(name)}</span>" for name in names),
        "</div>" if names else "",
        f'<div class="x">{html.escape(x)}</div>' if x else "",
    ]
    named = (
        "".join(f"<li {own(i)}>{html.escape(name)}</li>" for i, name in enumerate(legend)) if len(legend) > 1 else ""
    )
    ramp = f'<div class="ramp{" signed" * scale[2]}">{scale[0]}<i></i>{scale[1]}</div>' if scale else ""
    return (
        f'<figure class="chart">{f"<ul class=legend>{named}</ul>" if named else ""}{ramp}'
        f'<div class="plot" role="img" aria-label="{html.escape(label)}">{"".join(parts)}</div>'
        f"{f'<figcaption>{html.escape(caption)}</figcaption>' if caption else ''}</figure>"
    )


def tooltip(text: str) -> str:
    """Return the tooltip of a mark."""
    return f"<title>{html.escape(text)}</title>"
