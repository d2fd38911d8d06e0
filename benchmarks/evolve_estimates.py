"""Estimates of merges' scores from a few items against their full evaluation, for every estimator and extractor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.evolve_answers import Pool, Setting
from merganser.evolve import subsets
from merganser.evolve.design import EXTRACTORS
from merganser.evolve.estimators import Estimate, adaptive_c, blend, mp_irt, naive, p_irt
from merganser.evolve.irt import IRT, fit
from merganser.evolve.subsets import Subset


def extracted(extractor: str, size: int, pool: Pool, irt: IRT, seed: int) -> Subset:
    if extractor == "stratified":
        return subsets.stratified(pool.strata, size, seed=seed)
    if extractor == "irt":
        return subsets.irt_clustering(irt.items, size, seed=seed)
    if extractor == "representation":
        return subsets.representation_clustering(list(pool.features), size, seed=seed)
    return subsets.random(len(pool.strata), size, seed=seed)


def estimated(row: np.ndarray, subset: Subset, irt: IRT, gammas: np.ndarray, c: float) -> dict[str, Estimate]:
    """Estimates of one merge's score by every estimator."""
    y = row[subset.items]
    mean, p = naive(y, subset), p_irt(y, subset, irt)
    mle, mode = (mp_irt(y, subset, irt, gammas, fit=fit) for fit in ("mle", "map"))
    return {
        "naive": mean,
        "p-irt": p,
        "gp-irt": blend(0.5, mean, p),
        "mp-irt (mle)": mle,
        "mp-irt": mode,
        "gmp-irt": blend(0.5, mean, mode),
        "gmp-irt adaptive": blend(c, mean, mode),
    }


def measure_estimates(
    setting: Setting, pool: Pool, sizes: Sequence[int], draws: int, merges: int, seed: int
) -> dict[str, Any]:
    """MAE and rank correlation by n, extractor and estimator; ability errors by n and estimator (random items)."""
    endpoints = pool.endpoints(setting)
    began = time.process_time()
    irt = fit(np.concatenate([pool.calibration(setting), endpoints]), seed=seed)
    fitted = time.process_time() - began
    gammas = irt.abilities[-len(endpoints) :]
    mixed = [i for i, values in enumerate(setting.grid) if sum(w != 0 for w in values.values()) > 1][:merges]
    rows = pool.merges[mixed]
    truths = [irt.ability(row).mean for row in rows]
    scores = rows.mean(1)
    errors: dict[str, Any] = {}
    ranks: dict[str, Any] = {}
    abilities: dict[str, Any] = {}
    for size in sizes:
        for extractor in EXTRACTORS:
            found: dict[str, list[list[float]]] = {}
            angles: dict[str, list[tuple[float, float]]] = {}
            for draw in range(draws):
                subset = extracted(extractor, size, pool, irt, seed + draw)
                c = adaptive_c(endpoints, subset, irt)
                guesses: dict[str, list[float]] = {}
                for row, truth in zip(rows, truths, strict=True):
                    for name, estimate in estimated(row, subset, irt, gammas, c).items():
                        guesses.setdefault(name, []).append(estimate.value)
                        if estimate.ability is not None and not name.startswith("g"):
                            angles.setdefault(name, []).append(_distance(estimate.ability, truth))
                for name, values in guesses.items():
                    found.setdefault(name, []).append(values)
            errors.setdefault(str(size), {})[extractor] = {
                name: float(np.abs(np.array(v) - scores).mean()) for name, v in found.items()
            }
            ranks.setdefault(str(size), {})[extractor] = {
                name: float(np.mean([_agreement(values, scores) for values in v])) for name, v in found.items()
            }
            if extractor == "random":
                abilities[str(size)] = {
                    name: dict(zip(("euclidean", "cosine"), np.mean(v, 0).tolist(), strict=True))
                    for name, v in angles.items()
                }
    return {
        "merges": len(rows),
        "draws": draws,
        "score": {"mean": float(scores.mean()), "spread": float(scores.std())},
        "irt": {"models": len(irt.abilities), "dimensions": irt.dimensions, "cpu_seconds": fitted},
        "mae": errors,
        "mae_of_the_endpoints_mean": float(np.abs(endpoints.mean() - scores).mean()),
        "spearman": ranks,
        "ability": abilities,
    }


def _agreement(guesses: Sequence[float], scores: np.ndarray) -> float:
    """Spearman's rank correlation; 0 where the guesses are all the same, which rank nothing."""
    return float(spearmanr(guesses, scores).statistic) if np.ptp(guesses) > 0 else 0.0


def _distance(found: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """‖γ̂ − γ‖ and 1 − cos(γ̂, γ)."""
    norms = np.linalg.norm(found) * np.linalg.norm(truth)
    return float(np.linalg.norm(found - truth)), float(1 - found @ truth / norms) if norms else 1.0
