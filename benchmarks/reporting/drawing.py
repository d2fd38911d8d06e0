"""Figures as SVG: text stays text, and the same figure gives the same bytes with the same matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, TypeAlias

from benchmarks.reporting.parts import Axis, Bars, Figure, Lines, Panel, Plane

COLOURS = ("#2a78d6", "#e07b39", "#3a9d5d", "#9b59b6", "#c0392b", "#7f8c8d", "#d4a017", "#16a085", "#34495e", "#e84393")
MARKERS = "osD^vPX*<>"
#: Names that have the same colour in every figure.
KNOWN = {
    "limit": "#b0b7c3",
    "merganser": "#2a78d6",
    "Merganser": "#2a78d6",
    "mergekit": "#e07b39",
    "FusionBench": "#3a9d5d",
}
MARK = "merganser figure "
#: Colour and marker of each name.
Style: TypeAlias = Mapping[str, tuple[str, str]]


def render(figure: Figure) -> str:
    """The SVG file of a figure; it says in its description what it was drawn from."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    named = [panel for panel in figure.panels if not isinstance(panel, Plane)]
    names = dict.fromkeys(name for panel in named for name in panel.series)
    style = {
        name: (KNOWN.get(name, COLOURS[place % len(COLOURS)]), MARKERS[place % len(MARKERS)])
        for place, name in enumerate(names)
    }
    height = max(_height(panel) for panel in figure.panels) + 0.3 * (len(names) > 1)
    width = {1: 7.2, 2: 8.8}.get(len(figure.panels), 3.5 * len(figure.panels))
    settings = {"svg.hashsalt": "merganser", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 10}
    with pyplot.rc_context(settings):
        drawn, axes = pyplot.subplots(1, len(figure.panels), figsize=(width, height), layout="constrained")
        for place, panel in zip([axes] if len(figure.panels) == 1 else axes, figure.panels, strict=True):
            if isinstance(panel, Plane):
                _plane(place, panel)
            elif isinstance(panel, Bars):
                _bars(place, panel, style)
            else:
                _lines(place, panel, style)
        _legend(drawn)
        file = io.StringIO()
        drawn.savefig(file, format="svg", metadata={"Date": None, "Description": f"{MARK}{figure.digest()}"})
        pyplot.close(drawn)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def shows(svg: str, figure: Figure) -> bool:
    """Whether a stored drawing was made from these data, by whatever version of matplotlib."""
    return f"{MARK}{figure.digest()}" in svg


def _height(panel: Panel) -> float:
    if isinstance(panel, Bars):
        each = 0.2 + 0.04 * len(panel.series) if panel.dots else 0.12 + 0.19 * len(panel.series)
        return max(2.2, each * len(panel.names) + 1.2)
    return 3.4


def _plane(axes: Any, panel: Plane) -> None:
    percent = [[100 * value for value in row] for row in panel.values]
    filled = axes.contourf(panel.xs, panel.ys, percent, levels=range(0, 101, 10), cmap="viridis")
    axes.figure.colorbar(filled, ax=axes, label="accuracy, %", ticks=range(0, 101, 20))
    axes.plot(*zip(*panel.corners, strict=True), "o", color="white", markeredgecolor="black", markersize=6)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(panel.title)


def _lines(axes: Any, panel: Lines, style: Style) -> None:
    for name, points in panel.series.items():
        x, y = [point[0] for point in points], [point[1] for point in points]
        colour, marker = style[name]
        if panel.scatter:
            axes.plot(x, y, marker, color=colour, label=name, markersize=4, alpha=0.8)
            if name in panel.spread:
                axes.errorbar(x, y, panel.spread[name], fmt="none", ecolor=colour, elinewidth=1, alpha=0.6)
            continue
        axes.plot(x, y, marker=marker if len(x) <= 20 else None, color=colour, label=name, markersize=4, linewidth=1.5)
        if name in panel.spread:
            low = [value - around for value, around in zip(y, panel.spread[name], strict=True)]
            high = [value + around for value, around in zip(y, panel.spread[name], strict=True)]
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    for position, (name, level) in enumerate(panel.levels.items()):
        axes.axhline(level, color="#555555", linestyle=(":", "--", "-.")[position % 3], linewidth=1, label=name)
    _dress(axes, panel.x, panel.y, panel.title)


def _bars(axes: Any, panel: Bars, style: Style) -> None:
    thick = (0.45 if panel.dots else 0.8) / len(panel.series)
    for offset, (name, values) in enumerate(panel.series.items()):
        places = [number + (offset - (len(panel.series) - 1) / 2) * thick for number in range(len(panel.names))]
        shown = [0.0 if value is None else value for value in values]
        errors = panel.errors.get(name)
        if panel.dots:
            known = [(x, y) for x, y in zip(values, places, strict=True) if x is not None]
            axes.plot([x for x, _ in known], [y for _, y in known], "o", color=style[name][0], label=name, markersize=5)
            if errors is not None:
                around = [error for x, error in zip(values, errors, strict=True) if x is not None]
                place = {"fmt": "none", "ecolor": style[name][0], "elinewidth": 1, "alpha": 0.6}
                axes.errorbar([x for x, _ in known], [y for _, y in known], xerr=around, **place)
            continue
        drawn = axes.barh(places, shown, 0.92 * thick, label=name, color=style[name][0], xerr=errors)
        labels = ["" if value is None else panel.label.format(value) for value in values]
        axes.bar_label(drawn, labels, padding=3, fontsize=7.5)
    axes.set_yticks(range(len(panel.names)), list(panel.names))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    _dress(axes, panel.x, Axis(), panel.title)


def _legend(drawn: Any) -> None:
    """One legend under all panels, where it hides nothing."""
    found = {label: line for axes in drawn.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(found) > 1:
        widest = 0.6 + 0.065 * max(map(len, found))  # inches: the line, and letters of this size
        columns = max(1, min(len(found), int(drawn.get_figwidth() / widest)))
        place = {"loc": "outside lower center", "frameon": False, "fontsize": 8}
        drawn.legend(found.values(), found.keys(), ncols=columns, **place)


def _narrow(axis: Any) -> bool:
    low, high = axis.get_view_interval()
    return bool(abs(high - low) < 0.05)


def _dress(axes: Any, x: Axis, y: Axis, title: str) -> None:
    for name, axis in (("x", x), ("y", y)):
        own = getattr(axes, f"{name}axis")
        if axis.log:
            from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

            getattr(axes, f"set_{name}scale")("log")
            low, high = own.get_view_interval()
            if high < 1000 * low:
                own.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
                own.set_major_formatter(StrMethodFormatter("{x:g}"))
                own.set_minor_formatter(NullFormatter())
        if axis.limits:
            getattr(axes, f"set_{name}lim")(*axis.limits)
        if axis.percent:
            from matplotlib.ticker import PercentFormatter

            own.set_major_formatter(PercentFormatter(1.0, decimals=1 if _narrow(own) else 0, symbol=" %"))
        if axis.whole:
            from matplotlib.ticker import MaxNLocator

            own.set_major_locator(MaxNLocator(integer=True))
        if axis.label:
            own.set_label_text(axis.label)
    if title:
        axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_axisbelow(True)
