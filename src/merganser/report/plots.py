"""The beginnings of plotly figures; `Page.figure` gives them their look."""

from __future__ import annotations

from typing import Any

from merganser.errors import require


def empty(x: str = "", y: str = "") -> Any:
    """A figure without data; `x` and `y` are titles of its axes."""
    figure = require("plotly.graph_objects", "plots").Figure()
    figure.update_layout(xaxis_title=x, yaxis_title=y)
    return figure


def bars(names: list[str], values: list[float], x: str, y: str, labels: list[str] | None = None) -> Any:
    """One bar for each name, with a label on it."""
    figure = empty(x, y)
    figure.add_bar(x=names, y=values, text=labels)
    figure.update_xaxes(type="category")
    return figure
