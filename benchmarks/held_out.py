"""Predict the losses of merged pairs by a linear model that has seen neither the experts nor the method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]


def fit(signals: Sequence[str], rows: Sequence[Row], methods: Sequence[str]) -> np.ndarray:
    """Least squares of the losses of some methods on signals of the pairs: the constant, then a weight for each."""
    points = [(features(row, signals), row["methods"][method]["loss"]) for row in rows for method in methods]
    found: np.ndarray = np.linalg.lstsq(
        np.array([point for point, _ in points]), np.array([loss for _, loss in points]), rcond=None
    )[0]
    return found


def features(row: Row, signals: Sequence[str]) -> list[float]:
    return [1.0, *(row["signals"][name] for name in signals)]


def predictions(signals: Sequence[str], rows: Sequence[Row], method: str, others: Sequence[str]) -> list[float]:
    """The loss of every pair with a method, by the pairs that share no expert with it and the other methods."""
    found = []
    for row in rows:
        strangers = [other for other in rows if not set(other["experts"]) & set(row["experts"])]
        found.append(float(np.dot(features(row, signals), fit(signals, strangers, others))))
    return found


def transferred(
    signals: Sequence[str], known: Sequence[Row], rows: Sequence[Row], methods: Sequence[str]
) -> list[float]:
    """The loss of every pair of one zoo by the pairs of another."""
    weights = fit(signals, known, methods)
    return [float(np.dot(features(row, signals), weights)) for row in rows]
