"""Predict the losses of merges by a line that has seen neither the experts nor the method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]


def points(rows: Sequence[Row], methods: Sequence[str]) -> np.ndarray:
    """The disagreement of every merge with its experts, and what it loses."""
    return np.array([[row["methods"][m]["disagreement"], row["methods"][m]["loss"]] for row in rows for m in methods])


def fit(rows: Sequence[Row], methods: Sequence[str]) -> tuple[float, float]:
    """The slope of the line through 0 from the disagreement of merges to their losses, and the losses' spread around
    it.
    """
    x, y = points(rows, methods).T
    slope = float(x @ y / (x @ x))
    return slope, float(np.sqrt(((y - slope * x) ** 2).sum() / max(1, len(x) - 1)))


def predictions(known: Sequence[Row], rows: Sequence[Row], method: str, others: Sequence[str]) -> list[float]:
    """The loss of every row with a method, by the known rows that share no expert with it, merged by other methods."""
    found = []
    for row in rows:
        strangers = [other for other in known if not set(other["experts"]) & set(row["experts"])]
        found.append(fit(strangers, others)[0] * row["methods"][method]["disagreement"])
    return found
