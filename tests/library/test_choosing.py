"""Spending a byte budget: against every combination, and never beyond the budget."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.library.choosing import Mode, Option, choose, choose_modes, hull

points = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 100)), max_size=5)


def curve(pairs, error=100):
    return [Option(0, error, "none"), *(Option(n, e, str(i)) for i, (n, e) in enumerate(pairs))]


def brute(curves, budget):
    """The least error of all combinations that fit."""
    return min(
        sum(option.error for option in each)
        for each in itertools.product(*curves)
        if sum(option.nbytes for option in each) <= budget
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(points, min_size=1, max_size=4), st.integers(0, 120))
def test_choice_fits_and_is_as_good_as_any_up_to_one_step(several, budget):
    curves = [curve(pairs) for pairs in several]
    found = choose(curves, budget)
    assert sum(option.nbytes for option in found) <= budget
    best = brute(curves, budget)
    steps = [a.error - b.error for each in curves for a, b in itertools.pairwise(hull(each))]
    assert best <= sum(option.error for option in found) <= best + max(steps, default=0)


@settings(max_examples=100, deadline=None)
@given(st.lists(points, min_size=1, max_size=4), st.integers(0, 8))
def test_choice_is_optimal_where_a_step_just_fits(several, count):
    curves = [curve(pairs) for pairs in several]
    steps = [(b.error - a.error) / (b.nbytes - a.nbytes) for c in map(hull, curves) for a, b in itertools.pairwise(c)]
    sizes = [b.nbytes - a.nbytes for c in map(hull, curves) for a, b in itertools.pairwise(c)]
    order = sorted(range(len(steps)), key=lambda i: steps[i])[:count]
    budget = sum(sizes[i] for i in order)
    assert sum(option.error for option in choose(curves, budget)) == brute(curves, budget)


@given(points)
def test_the_hull_bends_one_way(pairs):
    found = hull(curve(pairs))
    slopes = [(b.error - a.error) / (b.nbytes - a.nbytes) for a, b in itertools.pairwise(found)]
    assert slopes == sorted(slopes)
    assert all(slope < 0 for slope in slopes)


@pytest.mark.parametrize("budget", [0, 3, 10, 17, 24, 60])
def test_modes_against_every_combination(budget):
    plain = {"a": curve([(4, 60), (12, 10)]), "b": curve([(4, 55), (12, 20)])}
    rest = {"a": curve([(3, 5)], 40), "b": curve([(3, 5)], 30)}
    modes = {"x": [Mode(plain), Mode(rest, Option(6, 0, "levels 0.5"))], "y": [Mode(plain)]}
    chosen = choose_modes(modes, budget)
    curves = [each for mode in chosen.values() for each in mode.curves.values()]
    spent = sum(mode.shared.nbytes for mode in chosen.values())
    found = sum(option.error for option in choose(curves, budget - spent))
    every = []
    for combination in itertools.product(*modes.values()):
        shared = sum(mode.shared.nbytes for mode in combination)
        if shared <= budget:
            every.append(brute([each for mode in combination for each in mode.curves.values()], budget - shared))
    steps = [a.error - b.error for each in curves for a, b in itertools.pairwise(hull(each))]
    assert min(every) <= found <= min(every) + max(steps, default=0)
