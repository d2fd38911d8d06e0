"""Statements of docs/theory.md about minimising an estimate, by simulation."""

import math

import numpy as np


def test_stability_in_expectation_does_not_bound_the_minimum() -> None:
    rng = np.random.default_rng(0)
    estimates = np.where(rng.random((400, 500)) < 0.05, 0.1, 0.5)
    errors = np.abs(0.5 - estimates)
    assert abs(errors.mean() - 0.02) < 1e-3
    gap = 0.5 - estimates.min(1).mean()
    assert abs(gap - 0.40) < 1e-3
    assert gap <= errors.max(1).mean() + 1e-12


def test_the_supremum_bounds_both_gaps_and_has_the_stated_size() -> None:
    rng = np.random.default_rng(1)
    candidates, items, draws = 175, 20, 2000
    truth = rng.uniform(0.3, 0.6, candidates)
    estimates = rng.binomial(items, truth, (draws, candidates)) / items
    largest = np.abs(estimates - truth).max(1).mean()
    best = truth.min()
    assert abs(best - estimates.min(1).mean()) <= largest
    assert truth[estimates.argmin(1)].mean() - best <= 2 * largest
    bound = math.sqrt(math.log(2 * candidates) / (2 * items))
    assert largest <= bound
    assert round(bound, 2) == 0.38
    assert 0.08 < np.abs(estimates - truth).mean() < 0.1
