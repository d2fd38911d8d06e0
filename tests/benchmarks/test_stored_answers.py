"""Stored answers: bits survive, accuracies and paired differences are those of plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import answers


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_bits_survive(bits: list[bool]) -> None:
    assert answers.unpack(answers.pack(np.array(bits)), len(bits)).tolist() == bits


def drawn(share: float, seed: int, seeds: int = 3, tasks: int = 2) -> answers.Answers:
    rng = np.random.default_rng(seed)
    return {str(s): {f"t{t}": rng.random(200) < share for t in range(tasks)} for s in range(seeds)}


def test_difference_is_that_of_normalised_accuracies() -> None:
    first, second, experts = drawn(0.8, 1), drawn(0.6, 2), drawn(0.9, 3)
    found = answers.difference(first, second, experts)
    each = [answers.normalised(first, experts, s) - answers.normalised(second, experts, s) for s in "012"]
    assert found.mean == pytest.approx(np.mean(each))
    assert found.clear
    summary = answers.summary(first, experts)
    assert summary["normalised"] == pytest.approx(np.mean([answers.normalised(first, experts, s) for s in "012"]))
    assert summary["accuracy"] == pytest.approx(np.mean([v.mean() for own in first.values() for v in own.values()]))


def test_error_is_that_of_repeated_draws_of_the_sentences() -> None:
    """One seed: the spread of the mean over many test sets of the same size."""
    means = []
    for seed in range(400):
        first, second = drawn(0.8, 2 * seed, 1), drawn(0.6, 2 * seed + 1, 1)
        perfect = {s: {t: np.ones(200, bool) for t in own} for s, own in first.items()}
        found = answers.difference(first, second, perfect)
        means.append(found.mean)
    assert found.error == pytest.approx(np.std(means), rel=0.15)


def test_equal_rows_lead_together_and_a_worse_one_does_not() -> None:
    best, worse, experts = drawn(0.9, 1), drawn(0.5, 2), drawn(0.95, 3)
    below = answers.leaders({"a": best, "b": dict(best), "c": worse}, experts)
    assert [below[name].clear for name in "abc"] == [False, False, True]
    assert below["c"].mean < 0


def test_paired_difference_of_runs() -> None:
    rng = np.random.default_rng(5)
    first, second = rng.random((1, 500)) < 0.8, rng.random((3, 500)) < 0.6
    found = answers.paired(first, second)
    gaps = [float(first[0, i]) - sum(map(float, second[:, i])) / 3 for i in range(500)]
    orders = [float(run.mean()) for run in second]
    assert found.mean == pytest.approx(first.mean() - second.mean())
    assert found.error**2 == pytest.approx(np.var(gaps, ddof=1) / 500 + np.var(orders, ddof=1) / 3)
    assert answers.paired(first, first).error == 0
