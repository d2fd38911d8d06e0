"""Estimates of merges' scores from a few items against their full evaluation, for every estimator and extractor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.evolve_answers import Pool, Setting
from merganser.evolve import subsets
from merganser.evolve.estimators import Estimate, adaptive_c, blend, mixture, mp_irt, naive, p_irt
from merganser.evolve.irt import IRT, fit
from merganser.evolve.subsets import Subset
from merganser.evolve.tasks import EXTRACTORS

#: A fit whose probabilities are all nearer than this to the answers has found a direction that separates them.
SEPARATED = 0.05


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


def fitted(row: np.ndarray, subset: Subset, irt: IRT, gammas: np.ndarray) -> dict[str, np.ndarray]:
    """The ability of one merge from the subset: free or a mixture of the endpoints', with a prior or without."""
    y = row[subset.items]
    return {
        "p-irt": irt.ability(y, subset.items, prior=False).mean,
        "p-irt (map)": irt.ability(y, subset.items).mean,
        "mp-irt (mle)": mixture(y, subset, irt, gammas, fit="mle").mean @ gammas,
        "mp-irt": mixture(y, subset, irt, gammas).mean @ gammas,
    }


def measure_abilities(
    rows: np.ndarray, irt: IRT, gammas: np.ndarray, sizes: Sequence[int], draws: int, seed: int
) -> dict[str, Any]:
    """By n and estimator, on random items: distance and 1 − cosine to the ability fitted on all items (posterior mode),
    and `probability`, the mean |p(γ̂) − p(γ)| over all items, which does not depend on how abilities are scaled.

    `separated` is the share of fits of p-IRT that reproduce every answer they saw: then some γ separates right from
    wrong, and the likelihood has no maximum.
    """
    truths = [irt.ability(row).mean for row in rows]
    found: dict[str, Any] = {}
    for size in sizes:
        errors: dict[str, list[tuple[float, float, float]]] = {}
        separated = []
        for draw in range(draws):
            subset = subsets.random(rows.shape[1], size, seed=seed + draw)
            for row, truth in zip(rows, truths, strict=True):
                guesses = fitted(row, subset, irt, gammas)
                seen = irt.probabilities(guesses["p-irt"])[subset.items]
                separated.append(np.abs(seen - row[subset.items]).max() < SEPARATED)
                for name, ability in guesses.items():
                    gap = np.abs(irt.probabilities(ability) - irt.probabilities(truth)).mean()
                    errors.setdefault(name, []).append((*_distance(ability, truth), float(gap)))
        found[str(size)] = {
            "separated": float(np.mean(separated)),
            "estimators": {
                name: dict(zip(("euclidean", "cosine", "probability"), np.mean(v, 0).tolist(), strict=True))
                for name, v in errors.items()
            },
        }
    return found


def measure_estimates(
    setting: Setting, pool: Pool, sizes: Sequence[int], draws: int, merges: int, seed: int
) -> dict[str, Any]:
    """MAE and rank correlation by n, extractor and estimator; ability errors by n and estimator (random items)."""
    endpoints = pool.endpoints(setting)
    began = time.process_time()
    irt = fit(np.concatenate([pool.calibration(setting), endpoints]), seed=seed)
    spent = time.process_time() - began
    gammas = irt.abilities[-len(endpoints) :]
    mixed = [i for i, values in enumerate(setting.grid) if sum(w != 0 for w in values.values()) > 1][:merges]
    rows = pool.merges[mixed]
    scores = rows.mean(1)
    errors: dict[str, Any] = {}
    ranks: dict[str, Any] = {}
    for size in sizes:
        for extractor in EXTRACTORS:
            found: dict[str, list[list[float]]] = {}
            for draw in range(draws):
                subset = extracted(extractor, size, pool, irt, seed + draw)
                c = adaptive_c(endpoints, subset, irt)
                guesses: dict[str, list[float]] = {}
                for row in rows:
                    for name, estimate in estimated(row, subset, irt, gammas, c).items():
                        guesses.setdefault(name, []).append(estimate.value)
                for name, values in guesses.items():
                    found.setdefault(name, []).append(values)
            errors.setdefault(str(size), {})[extractor] = {
                name: float(np.abs(np.array(v) - scores).mean()) for name, v in found.items()
            }
            ranks.setdefault(str(size), {})[extractor] = {
                name: float(np.mean([_agreement(values, scores) for values in v])) for name, v in found.items()
            }
    return {
        "merges": len(rows),
        "draws": draws,
        "score": {"mean": float(scores.mean()), "spread": float(scores.std())},
        "irt": {
            "models": len(irt.abilities),
            "dimensions": irt.dimensions,
            "singular_values": np.linalg.svd(irt.items.discrimination, compute_uv=False).tolist(),
            "cpu_seconds": spent,
        },
        "mae": errors,
        "mae_of_the_endpoints_mean": float(np.abs(endpoints.mean() - scores).mean()),
        "spearman": ranks,
        "ability": measure_abilities(rows, irt, gammas, sizes, draws, seed),
    }


def _agreement(guesses: Sequence[float], scores: np.ndarray) -> float:
    """Spearman's rank correlation; 0 where the guesses are all the same, which rank nothing."""
    return float(spearmanr(guesses, scores).statistic) if np.ptp(guesses) > 0 else 0.0


def _distance(found: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """‖γ̂ − γ‖ and 1 − cos(γ̂, γ)."""
    norms = np.linalg.norm(found) * np.linalg.norm(truth)
    return float(np.linalg.norm(found - truth)), float(1 - found @ truth / norms) if norms else 1.0
