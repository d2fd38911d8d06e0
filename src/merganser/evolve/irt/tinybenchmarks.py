"""Item parameters and abilities as tinyBenchmarks publishes them, from a converted file.

The published file is a pickle, which can run code, so it is not read here: the script
`examples/convert_tinybenchmarks.py` converts it into plain arrays once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from merganser.errors import InputError, did_you_mean
from merganser.evolve.arrays import Array, Indices
from merganser.evolve.irt.model import IRT, Items, Normal
from merganser.evolve.numpy_files import read_arrays
from merganser.evolve.subsets import Subset

CONVERT = (
    "tinyBenchmarks' file is a pickle, which can run code and is not read; convert it once with "
    "examples/convert_tinybenchmarks.py and use the .npz file"
)


@dataclass(frozen=True)
class TinyBenchmark:
    """One benchmark of the file: its IRT, and for each scenario its items and the published anchor subset."""

    irt: IRT
    scenarios: Mapping[str, Indices]
    anchors: Mapping[str, Subset]


def load(path: str | PathLike[str], benchmark: str = "lb") -> TinyBenchmark:
    """Read one benchmark of a converted file.

    Args:
        path: The .npz file.
        benchmark: lb, mmlu, helm_lite or alpaca, as published.

    Returns:
        Its IRT, scenarios and anchors.

    Raises:
        InputError: If the file is not a converted file, or lacks the benchmark or parts of it.

    Example:
        >>> load("tinyBenchmarks.npz", "mmlu").irt.dimensions  # doctest: +SKIP
    """
    if Path(path).suffix in (".pkl", ".pickle"):
        raise InputError(f"{path}: {CONVERT}")
    arrays = read_arrays(path)
    benchmarks = {name.partition("/")[0] for name in arrays if "/" in name}
    if not benchmarks:
        raise InputError(f"{path}: contains no benchmarks; {CONVERT}")
    if benchmark not in benchmarks:
        raise InputError(f"{path} has no benchmark {benchmark!r}{did_you_mean(benchmark, benchmarks)}")
    parts = {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith(f"{benchmark}/")}
    items = _read_items(parts, f"benchmark {benchmark!r} of {path}")
    scenarios = {
        name.removeprefix("scenarios/"): _read_indices(array, len(items), f"{path}: {benchmark}/{name}")
        for name, array in parts.items()
        if name.startswith("scenarios/")
    }
    return TinyBenchmark(_read_irt(items, parts), scenarios, _read_anchors(parts, scenarios, len(items), str(path)))


def _read_indices(array: NDArray[Any], count: int, where: str) -> Indices:
    """Return checked item numbers."""
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.size and not 0 <= array.min() <= array.max() < count):
        raise InputError(f"{where}: expected numbers of items from 0 below {count}")
    return array.astype(np.intp)


def _read_items(parameters: Mapping[str, Any], where: str) -> Items:
    """Read A (1 × D × N) and B (1 × 1 × N), with z = Σ_d (A_d θ_d − B) = A·θ − D B: the published models were fitted
    with the difficulty inside the sum over dimensions.
    """
    if missing := {"A", "B"} - set(parameters):
        raise InputError(f"{where} lacks {', '.join(sorted(missing))}")
    a, b = (np.asarray(parameters[key], dtype=np.float64) for key in ("A", "B"))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError(f"{where}: A and B are not finite everywhere")
    if a.ndim != 3 or a.shape[0] != 1 or b.size != a.shape[2]:
        raise InputError(f"{where}: A has shape {a.shape} and B {b.shape}; expected 1×D×N and 1×1×N")
    return Items(np.ascontiguousarray(a[0].T), a.shape[1] * b.reshape(-1))


def _read_irt(items: Items, parameters: Mapping[str, Any]) -> IRT:
    dimensions = items.discrimination.shape[1]
    theta: Array = np.asarray(parameters.get("Theta", np.zeros((0, dimensions))), dtype=np.float64)
    if theta.size % max(dimensions, 1) or not np.isfinite(theta).all():
        raise InputError(f"Theta has shape {theta.shape}; expected finite abilities, models × {dimensions}")
    theta = theta.reshape(-1, dimensions)
    if len(theta) > 1:
        prior = Normal(theta.mean(0), 1 / np.maximum(theta.var(0), 1e-3))
    else:
        prior = Normal(np.zeros(dimensions), np.ones(dimensions))
    return IRT(theta, items, prior)


def _read_anchors(
    parts: Mapping[str, NDArray[Any]], scenarios: Mapping[str, Indices], count: int, path: str
) -> dict[str, Subset]:
    """Return the anchors of each scenario: those of `anchors` in its range of items.

    An item that represents two clusters is listed twice (once in published helm_lite); here once, with both weights.
    """
    if "anchors" not in parts:
        return {}
    seen = _read_indices(parts["anchors"], count, f"{path}: anchors")
    anchors = {}
    for name, positions in scenarios.items():
        inside = seen[np.isin(seen, positions)]
        weight = np.asarray(parts.get(f"weights/{name}", ()), dtype=np.float64).reshape(-1)
        if len(inside) and len(weight) == len(inside) and np.isfinite(weight).all() and weight.sum() > 0:
            items, place = np.unique(inside, return_inverse=True)
            anchors[name] = Subset(items, np.bincount(place, weight) / weight.sum())
    return anchors
