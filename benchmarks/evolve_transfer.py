"""Negative transfer, on kept answers: what a merge forgets of what its endpoints know.

The rate is the thesis': of the items that at least one endpoint answers rightly, the share that the merge does not.
Beside it the same against the best endpoint alone, and what merging gains: of the items that no endpoint answers
rightly, the share that the merge does. Winners are judged on the items their search never saw, all seeds together;
merges that nothing was searched for on all items. Endpoints have a rate too, since each lacks what the others know: it
is what doing nothing loses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.evolve_answers import Pool, Setting
from benchmarks.evolve_winners import unseen
from merganser.evolve.space import key


def ratio(hits: np.ndarray, counted: np.ndarray) -> dict[str, float]:
    """Σ hits / Σ counted over models (rows) and items (columns), with the standard error of items drawn at random.

    An item that several models were asked counts once as a draw: error² = Σ_i (h_i − rate · k_i)² / (Σ_i k_i)² with the
    item's sums h_i and k_i over the models, which for one model is rate · (1 − rate) / items.
    """
    found, asked = (hits & counted).sum(0), counted.sum(0)
    total = int(asked.sum())
    rate = float(found.sum() / total) if total else float("nan")
    error = float(np.sqrt(((found - rate * asked) ** 2).sum()) / total) if total else float("nan")
    return {"rate": rate, "error": error, "items": int((asked > 0).sum()), "answers": total}


def transferred(
    right: np.ndarray, counted: np.ndarray, endpoints: np.ndarray, best: int, strata: Sequence[str]
) -> dict[str, Any]:
    """Of models (rows of `right`) on the items `counted` says: rates by task and over all, against the best endpoint
    alone, and what was gained."""
    known, tasks = endpoints.any(0), np.array(strata)
    return {
        "tasks": {task: ratio(~right, counted & known & (tasks == task)) for task in dict.fromkeys(strata)},
        "all": ratio(~right, counted & known),
        "best_endpoint": ratio(~right, counted & endpoints[best]),
        "gained": ratio(right, counted & ~known),
    }


def measure_transfer(setting: Setting, pool: Pool, searches: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """By search and fitness, of merges with equal weights, of all merges of the grid, and of the endpoints."""
    endpoints = pool.endpoints(setting) == 1
    best = int(endpoints.mean(1).argmax())
    grid = {key(values): row == 1 for values, row in zip(setting.grid, pool.merges, strict=True)}

    def of(rows: Sequence[np.ndarray], counted: np.ndarray | None = None) -> dict[str, Any]:
        right = np.array(rows)
        every = np.ones_like(right) if counted is None else counted
        return transferred(right, every, endpoints, best, pool.strata)

    mixed = [values for values in setting.grid if sum(weight != 0 for weight in values.values()) > 1]
    equal = [weight for weight in setting.weights if weight != 0]
    return {
        "best_endpoint": setting.experts[best],
        "known": int(endpoints.any(0).sum()),
        "items": len(pool.strata),
        "winners": {
            name: {
                fitness: of(
                    [grid[key(setting.point(run["weights"]))] for run in row["runs"]],
                    np.array([unseen(pool, seed) for seed in search["seeds"]]),
                )
                for fitness, row in search["fitness"].items()
            }
            for name, search in searches.items()
        },
        "equal_weights": {str(w): of([grid[key(setting.point([w] * len(setting.experts)))]]) for w in equal},
        "grid": {"merges": len(mixed), **of([grid[key(values)] for values in mixed])},
        "endpoints": {name: of([row]) for name, row in zip(setting.experts, endpoints, strict=True)},
    }
