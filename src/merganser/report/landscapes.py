"""Charts of the loss between networks: segments with their barriers, and planes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from merganser.report.charts import Series, heat_map, line_chart
from merganser.report.tables import Table

#: Times of a measurement, as a landscape has them.
TIMES = ("before", "after")


def segment_chart(curves: Mapping[str, Mapping[str, Any]], caption: str = "") -> str:
    """Return the loss along segments.

    Args:
        curves: `analysis.landscape.Segment.to_dict()` by the name of the curve.
        caption: A sentence below the chart.
    """
    lines = [Series(name, curve["positions"], curve["losses"]) for name, curve in curves.items()]
    return line_chart(lines, "share of the second network", "loss", caption=caption)


def plane_chart(plane: Mapping[str, Any], names: Sequence[str], caption: str = "", also: Sequence[float] = ()) -> str:
    """Return the loss over a plane as a picture, with its three networks marked.

    Args:
        plane: `analysis.landscape.Plane.to_dict()`.
        names: The names of its networks.
        caption: A sentence below the chart.
        also: Losses of another picture that shares the colours.
    """
    xs, ys, rows = plane["xs"], plane["ys"], plane["losses"]
    points = {
        name: ((x - xs[0]) / (xs[-1] - xs[0]), (ys[-1] - y) / (ys[-1] - ys[0]))
        for name, (x, y) in zip(names, plane["anchors"], strict=True)
    }
    where = "; ".join(f"{name} at ({x:.3g}, {y:.3g})" for name, (x, y) in zip(names, plane["anchors"], strict=True))
    known = [loss for row in rows for loss in row if math.isfinite(loss)] + [
        loss for loss in also if math.isfinite(loss)
    ]
    every = max(1, (len(xs) - 1) // 4)
    return heat_map(
        list(reversed(rows)),
        [f"{y:.3g}" if i % every == 0 else "" for i, y in enumerate(ys)][::-1],
        [f"{x:.3g}" if i % every == 0 else "" for i, x in enumerate(xs)],
        low=min(known, default=0.0),
        high=max(known, default=1.0),
        log=bool(known) and min(known) > 0,
        x="distance in weight space",
        points=points,
        caption=f"{caption} Dots: {where}.".strip(),
    )


def barrier_table(segments: Sequence[Mapping[str, Any]]) -> Table:
    """Return the barriers of every two networks before and after alignment."""
    rows = [[" – ".join(each["models"]), *(each[when]["barrier"] for when in TIMES)] for each in segments]
    caption = "Loss barrier: the largest loss on the way minus the mean of both ends"
    return Table(["networks", "before", "after"], rows, caption)


def barrier_verdict(segments: Sequence[Mapping[str, Any]]) -> str:
    """Describe what alignment did to the barriers."""
    before, after = ([each[when]["barrier"] for each in segments] for when in TIMES)
    lower = sum(b > a for b, a in zip(before, after, strict=True))
    mean = f"from {sum(before) / len(before):.3g} to {sum(after) / len(after):.3g}"
    pairs = "the pair" if len(segments) == 1 else f"{lower} of {len(segments)} pairs"
    if lower == 0:
        return f"Alignment lowered no loss barrier: on average they went {mean}."
    return f"Alignment lowered the loss barrier of {pairs}, on average {mean}."
