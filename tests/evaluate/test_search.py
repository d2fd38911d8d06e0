"""Grid search and successive halving over coefficients."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merganser.errors import InputError
from merganser.evaluate.search import ALPHAS, scale_search, scaled, successive_halving


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12))
def test_one_budget_is_a_grid_search(values):
    table = {str(i): v for i, v in enumerate(values)}
    found = successive_halving(list(table), lambda c, _: table[c], budgets=[7])
    assert found.score == max(values)
    assert found.best == str(values.index(max(values)))
    assert found.spent == 7 * len(values)


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=12),
    st.lists(st.integers(1, 100), min_size=1, max_size=4, unique=True),
)
def test_halving_with_exact_scores_finds_the_best_for_less(values, budgets):
    table = {str(i): v for i, v in enumerate(values)}
    found = successive_halving(list(table), lambda c, _: table[c], budgets=sorted(budgets))
    assert found.score == max(values)
    sizes = [len(r.scores) for r in found.rungs]
    assert all(b == max(1, math.ceil(a / 2)) for a, b in itertools.pairwise(sizes))


def test_the_best_scale_of_a_known_problem():
    base = {"w": torch.tensor([1.0, 2.0]), "count": torch.tensor(4)}
    vector = {"w": torch.tensor([2.0, -1.0])}
    target = base["w"] + 0.7 * vector["w"]
    seen = []

    def score(weights, budget):
        seen.append(budget)
        return -float((weights["w"] - target).norm())

    found = scale_search(base, vector, score, budgets=[10, 40])
    assert found.best == "0.7"
    assert found.spent == 10 * len(ALPHAS) + 40 * len(ALPHAS) // 2
    assert seen.count(40) == len(ALPHAS) // 2
    assert base["w"].tolist() == [1.0, 2.0]
    moved = scaled(base, vector, 0.5)
    assert moved["w"].tolist() == [2.0, 1.5]
    assert moved["count"] == 4
    json.dumps(found.to_dict(), allow_nan=False)


def test_scores_that_are_no_numbers_lose():
    table = {"a": math.nan, "b": -3.0, "c": math.nan}
    assert successive_halving("abc", lambda c, _: table[c], budgets=[1, 2]).best == "b"


def test_mistakes():
    with pytest.raises(InputError, match="different"):
        successive_halving(["a", "a"], lambda c, b: 0.0, budgets=[1])
    with pytest.raises(InputError, match="rise"):
        successive_halving(["a"], lambda c, b: 0.0, budgets=[2, 1])
    with pytest.raises(InputError, match="keep"):
        successive_halving(["a"], lambda c, b: 0.0, budgets=[1], keep=1.0)
    with pytest.raises(InputError, match="did you mean 'weight'"):
        scaled({"weight": torch.zeros(1)}, {"weigth": torch.zeros(1)}, 1.0)
