"""Figures of the analyses with plotly (extra `plots`). Functions return figures; use `figure.write_html(path)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from merganser.analysis.disentanglement import Disentanglement
from merganser.analysis.gradients.expansion import Order
from merganser.analysis.landscape import Plane, Segment
from merganser.analysis.similarity import RepresentationSimilarity, WeightSimilarity
from merganser.analysis.trajectory import LinearRegime, Projection
from merganser.errors import one_of, require

Figure: TypeAlias = Any
"""A `plotly.graph_objects.Figure`."""
Metric: TypeAlias = Literal["loss", "accuracy"]
RegimePlot: TypeAlias = Literal["cosines", "shares", "straightness"]


def segments(curves: Mapping[str, Segment], metric: Metric = "loss") -> Figure:
    """Plot interpolation curves together, for example before and after alignment.

    Args:
        curves: The curves by name.
        metric: `"loss"` or `"accuracy"`.
    """
    one_of("metric", metric, Metric)
    figure = _figure(x="λ", y=metric)
    for name, curve in curves.items():
        values = curve.losses if metric == "loss" else curve.accuracies
        figure.add_scatter(x=curve.positions, y=values, name=name, mode="lines+markers")
    return figure


def plane(report: Plane, metric: Metric = "loss", *, log: bool = False) -> Figure:
    """Plot contours over the plane with the three models marked.

    Args:
        report: The result of `landscape.plane`.
        metric: `"loss"` or `"accuracy"`.
        log: Plot log10 of the values.
    """
    one_of("metric", metric, Metric)
    rows = report.losses if metric == "loss" else report.accuracies
    values = np.array(rows, dtype=float)
    figure = _figure(x="weight distance", y="weight distance")
    title = f"log10 {metric}" if log else metric
    figure.add_contour(
        x=report.xs, y=report.ys, z=np.log10(np.maximum(values, 1e-12)) if log else values, colorbar={"title": title}
    )
    xs, ys = zip(*report.anchors, strict=True)
    figure.add_scatter(x=xs, y=ys, mode="markers+text", text=["1", "2", "3"], textposition="top center", name="models")
    figure.update_yaxes(scaleanchor="x")
    return figure


def similarity(report: WeightSimilarity | RepresentationSimilarity, measure: str | None = None) -> Figure:
    """Plot a heat map of `cosine`, `cka` (the defaults) or `distance` between models.

    Args:
        report: The result of a comparison.
        measure: `"cosine"`, `"cka"` or `"distance"`; by default the first that the result has.
    """
    known = ("cosine", "distance") if isinstance(report, WeightSimilarity) else ("cka", "distance")
    chosen = known[0] if measure is None else measure
    one_of(f"measure of {type(report).__name__}", chosen, known)
    figure = _figure()
    figure.add_heatmap(
        x=report.names, y=report.names, z=getattr(report, chosen), colorbar={"title": chosen}, texttemplate="%{z:.3f}"
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def regime(report: LinearRegime, what: RegimePlot = "cosines") -> Figure:
    """Plot one curve per expert over epochs: cos(τ₁, τ_k), shares of the path, or straightness.

    Args:
        report: The result of `trajectory.linear_regime`.
        what: What to plot over the epochs.
    """
    one_of("what", what, RegimePlot)
    figure = _figure(x="epoch", y={"cosines": "cos(τ₁, τ_k)", "shares": "share of the path"}.get(what, what))
    for name, run in report.runs.items():
        values = getattr(run, what)
        figure.add_scatter(x=list(range(1, len(values) + 1)), y=values, name=name, mode="lines+markers")
    if what == "cosines":
        for level in (report.linear_from, report.bent_from):
            figure.add_hline(y=level, line_dash="dot")
    return figure


def projection(report: Projection) -> Figure:
    """Plot checkpoints of several strategies in their common principal plane, joined in order.

    Args:
        report: The result of `trajectory.project`.
    """
    x, y = (f"axis {i + 1} ({share:.0%} of variance)" for i, share in enumerate(report.explained))
    figure = _figure(x=x, y=y)
    for name, points in report.points.items():
        xs, ys = zip(*points, strict=True)
        figure.add_scatter(x=xs, y=ys, name=name, mode="lines+markers")
    return figure


def disentanglement(report: Disentanglement) -> Figure:
    """Plot a heat map of ξ(α₁, α₂).

    Args:
        report: The result of `disentanglement.disentanglement`.
    """
    figure = _figure(x="α₁", y="α₂")
    columns = list(zip(*report.error, strict=True))
    figure.add_heatmap(x=report.first, y=report.second, z=columns, colorbar={"title": "ξ"})
    return figure


def order(report: Order) -> Figure:
    """Plot the gap, and what the second-order term leaves of it, against η on logarithmic axes.

    Args:
        report: The result of `gradients.observed_order`.
    """
    figure = _figure(x="η", y="norm")
    etas = [g.eta for g in report.gaps]
    curves = {
        f"gap, slope {report.gap_slope:.2f}": [g.gap for g in report.gaps],
        f"after −αη²C, slope {report.residual_slope:.2f}": [g.residual for g in report.gaps],
    }
    for name, values in curves.items():
        figure.add_scatter(x=etas, y=values, name=name, mode="lines+markers")
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def _figure(*, x: str | None = None, y: str | None = None) -> Figure:
    figure = require("plotly.graph_objects", "plots").Figure()
    figure.update_layout(xaxis_title=x, yaxis_title=y, template="plotly_white")
    return figure
