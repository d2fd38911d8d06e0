"""Estimators, re-ranking and verdicts of studies, on simulated answers whose truth is known.

    python -m benchmarks.evolve_simulations [--quick]

Three tables: the error of estimated scores and the coverage of their intervals by how many models the IRT was fitted
to; what re-ranking the best k candidates on the pool gains in true score; how often a winner is called better than an
equal.
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.special import expit

from merganser.evolve.intervals import paired_interval
from merganser.evolve.objectives import Objective
from merganser.evolve.preparation import prepare, split
from merganser.evolve.tasks import StudyTask

FITNESS = (("random", "naive", 0.5), ("irt", "naive", 0.5), ("irt", "gp-irt", "adaptive"), ("random", "p-irt", 0.5))


def simulate(seed: int, models: int, items: int) -> np.ndarray:
    """Answers of models whose abilities are normal in three dimensions."""
    rng = np.random.default_rng(seed)
    discrimination, difficulty = rng.lognormal(-0.3, 0.4, (items, 3)), rng.normal(size=items)
    p = expit(0.8 * rng.normal(size=(models, 3)) @ discrimination.T - difficulty)
    return (rng.random(p.shape) < p).astype(float)


def estimates(
    calibration: int, fitness: tuple[str, str, float | str], seeds: int, items: int, size: int
) -> list[float]:
    """Root mean squared error, coverage of 95 % intervals and effective size of the subset, over unseen models."""
    extractor, estimator, c = fitness
    errors, inside, sizes = [], [], []
    for seed in range(seeds):
        answers = simulate(seed, calibration + 40, items)
        task = StudyTask(items, size, extractor, estimator, c)
        pool = split("t", task, 0).pool
        prepared = prepare("t", task, seed, {str(i): answers[i][pool] for i in range(calibration)})
        sizes.append(1 / (prepared.subset.weights**2).sum())
        for row in answers[calibration:, pool]:
            found = prepared.estimator(row[prepared.subset.items], prepared.subset)
            errors.append(found.value - row.mean())
            inside.append(abs(errors[-1]) <= 1.96 * (found.error or 0.0))
    return [float(np.sqrt(np.mean(np.square(errors)))), float(np.mean(inside)), float(np.mean(sizes))]


def reranking(k: int, studies: int, candidates: int = 100, pool: int = 300, size: int = 20) -> tuple[float, float]:
    """True score of the winner, mean and standard error, when the best k by a subset are ranked again on the pool."""
    found = []
    for seed in range(studies):
        rng = np.random.default_rng(seed)
        quality, hardness = rng.normal(0.6, 0.3, candidates), rng.normal(size=pool)
        p = expit(quality[:, None] - hardness)
        answers = rng.random(p.shape) < p
        chosen = rng.choice(pool, size, replace=False)
        best = np.argsort(-answers[:, chosen].mean(1), kind="stable")[: max(k, 1)]
        found.append(p[best[answers[best].mean(1).argmax()] if k else best[0]].mean())
    return float(np.mean(found)), float(np.std(found, ddof=1) / studies**0.5)


def verdicts(count: int, difference: float, studies: int) -> dict[str, float]:
    """Shares of the verdicts on two models with a true difference, asked the same items."""
    rng = np.random.default_rng(count)
    said = []
    for _ in range(studies):
        hard = 0.6 * (rng.random(count) - 0.5)
        left, right = ((rng.random(count) < 0.6 + hard + d).astype(float) for d in (difference, 0.0))
        said.append(paired_interval(Objective.of("q"), {"q": left}, {"q": right}).verdict)
    return {verdict: said.count(verdict) / studies for verdict in ("better", "worse", "cannot tell")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    quick = parser.parse_args().quick
    seeds, items, size = (2, 200, 40) if quick else (10, 1000, 200)
    print("models  items by   estimator  c         error   coverage  effective n")
    for calibration in (3,) if quick else (3, 6, 10, 20, 50):
        for fitness in FITNESS:
            error, coverage, effective = estimates(calibration, fitness, seeds, items, size)
            names = f"{fitness[0]:<9}  {fitness[1]:<9}  {fitness[2]!s:<8}"
            print(f"{calibration:6}  {names}  {error:.4f}  {coverage:8.2f}  {effective:.0f}")
    print("\nre-ranked  true score of the winner")
    for k in (0, 3, 5, 10):
        mean, error = reranking(k, 50 if quick else 500)
        print(f"{k:9}  {mean:.4f} ± {error:.4f}")
    print("\nitems  difference  better  worse  cannot tell")
    for count in (25, 100, 400):
        for difference in (0.0, 0.1):
            shares = verdicts(count, difference, 200 if quick else 2000)
            print(f"{count:5}  {difference:10.1f}  " + "  ".join(f"{share:.3f}" for share in shares.values()))


if __name__ == "__main__":
    main()
