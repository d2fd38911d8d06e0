"""The compiled solver of assignments gives scipy's solutions, from any prices."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from merganser.kernels import linear_assignment
from merganser.kernels.linear_assignment import Prices, assign, library, value_of

compiled = pytest.mark.skipif(library() is None, reason="the compiled solver was not built")


def problem(rng, size, kind, dtype):
    """Return profits: independent, a sorting problem (long augmenting paths), or small whole numbers (many ties)."""
    if kind == "sorting":
        rows, columns = np.sort(rng.random(size)), rng.random(size)
        profit = np.outer(rows, columns) + 1e-3 * rng.standard_normal((size, size))
    elif kind == "ties":
        profit = rng.integers(-2, 3, (size, size)).astype(np.float64)
    else:
        profit = rng.standard_normal((size, size))
    return profit.astype(dtype)


def best_value(profit):
    return value_of(profit, linear_sum_assignment(profit, maximize=True)[1])


def test_the_solver_is_built_where_there_is_a_compiler():
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    assert library() is not None, "install again (pip install -e .) and look at what the compiler says"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from(["independent", "sorting", "ties"]),
    st.sampled_from([np.float32, np.float64]),
    st.integers(0, 2**32 - 1),
)
def test_solutions_are_optimal_from_any_prices(size, kind, dtype, seed):
    rng = np.random.default_rng(seed)
    prices = Prices(rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4), rng.permutation(size), rng.random())
    for _ in range(3):
        profit = problem(rng, size, kind, dtype)
        for order in (assign(profit), assign(profit, prices)):
            assert sorted(order) == list(range(size))
            assert value_of(profit, order) == pytest.approx(best_value(profit), rel=1e-12, abs=1e-12)


@compiled
def test_prices_prove_the_solution_optimal_and_follow_a_changing_problem():
    rng = np.random.default_rng(0)
    profit, prices = problem(rng, 60, "sorting", np.float64), Prices()
    for scale in (1.0, 1.0, 7.0, 0.3):
        profit = scale * (profit + 1e-4 * rng.standard_normal(profit.shape))
        order = assign(profit, prices)
        left = profit - prices.values
        assert (left[np.arange(60), order] >= left.max(axis=1) - 1e-9).all()
        assert (order == linear_sum_assignment(profit, maximize=True)[1]).all()
        assert prices.value == pytest.approx(value_of(profit, order))
        assert prices.values.min() == 0.0


def test_without_the_compiled_solver_scipy_solves(monkeypatch):
    profit = np.random.default_rng(1).standard_normal((20, 20))
    expected = assign(profit)
    monkeypatch.setattr(linear_assignment, "library", lambda: None)
    assert (assign(profit, Prices()) == expected).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_profits_that_are_not_numbers_are_refused_and_do_not_crash(wrong):
    profit = np.zeros((4, 4))
    profit[2] = wrong
    with pytest.raises(ValueError, match=r"invalid|infeasible"):
        assign(profit * np.nan if wrong == np.inf else profit)


def test_views_and_huge_profits_are_solved():
    profit = np.random.default_rng(2).standard_normal((12, 12))
    expected = assign(profit)
    assert (assign(np.asfortranarray(profit)) == expected).all()
    assert (assign(np.repeat(profit, 2, axis=1)[:, ::2]) == expected).all()
    assert (assign(profit * 1e200) == expected).all()
    assert assign(np.zeros((0, 0))).size == 0
