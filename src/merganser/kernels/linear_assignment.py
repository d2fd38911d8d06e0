"""Linear assignment: by the compiled solver (`linear_assignment.c`) where it was built, otherwise by scipy.

Both solve it exactly, by shortest augmenting paths. The compiled one can start from the prices of a similar problem,
which makes it many times faster: Frank-Wolfe and coordinate ascent solve slowly changing problems again and again.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from merganser.kernels.compiled import load_library

Index = NDArray[np.int64]
Profit = NDArray[np.floating[Any]]
#: The version of the library that this module speaks to.
VERSION = 1


@dataclass
class Prices:
    """What the last solved assignment knows about the next: the prices of its columns, its solution and its value.

    No row would rather have another column at these prices, which proves the solution optimal. They are only a start
    for the next problem and do not change its solution, except for the choice between equally good ones.
    """

    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    order: Index = field(default_factory=lambda: np.zeros(0, np.int64))
    value: float = 0.0

    def start(self, profit: Profit) -> NDArray[np.float64]:
        """Return prices for a problem, on its scale: that of the last solution's value in it."""
        size = len(profit)
        if len(self.values) != size or self.value <= 0.0:
            return np.zeros(size)
        now = value_of(profit, self.order)
        return self.values * (now / self.value) if now > 0.0 else np.zeros(size)


@lru_cache(maxsize=1)
def library() -> Any:
    """Return the compiled solver, or None if it was not built or cannot be loaded."""
    loaded = load_library("linear_assignment", VERSION)
    if loaded is None:
        return None
    run = loaded.assign_rows
    run.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    run.restype = ctypes.c_int
    return run


def assign(profit: Profit, prices: Prices | None = None) -> Index:
    """Return the permutation p that maximises Σ_u profit[u, p[u]], by shortest augmenting paths in O(m³).

    Args:
        profit: The profits (m, m), rows by columns.
        prices: Those of the last, similar problem, to be used and brought up to date.
    """
    run = library()
    stored = np.ascontiguousarray(profit, dtype=np.float32 if profit.dtype == np.float32 else np.float64)
    if run is None or not isfinite(np.vdot(stored, stored)):
        plain: Index = linear_sum_assignment(profit, maximize=True)[1]
        return plain.astype(np.int64)
    prices = prices or Prices()
    size = len(stored)
    values, order = prices.start(stored), np.empty(size, np.int64)
    if run(size, stored.ctypes.data, stored.dtype == np.float32, values.ctypes.data, order.ctypes.data):
        raise MemoryError(f"an assignment of {size} units does not fit in memory")
    prices.values, prices.order, prices.value = values, order, value_of(stored, order)
    return order


def value_of(profit: Profit, order: Index) -> float:
    """Return Σ_u profit[u, order[u]] in float64."""
    return float(profit[np.arange(order.size), order].sum(dtype=np.float64))
