from __future__ import annotations

import glob

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merganser.recipes.settings import Case, Choice, Gradient, evaluate, matches

NAMES = st.sampled_from(
    ["model.layers.0.mlp.up.weight", "model.layers.3.self_attn.q.weight", "lm_head.weight", "model.embed_tokens.weight"]
)
DEPTHS = st.floats(0, 1)
NUMBERS = st.floats(-10, 10)


def naive_interpolation(values, t):
    """The polyline through (k / (n − 1), values[k]), found by looking for the segment t lies in."""
    n = len(values)
    if n == 1:
        return values[0]
    for k in range(n - 1):
        left, right = k / (n - 1), (k + 1) / (n - 1)
        if left <= t <= right:
            return values[k] + (values[k + 1] - values[k]) * (t - left) / (right - left)
    raise AssertionError


@given(st.lists(NUMBERS, min_size=1, max_size=7), DEPTHS)
def test_numbers_are_interpolated_over_depth(values, t):
    assert Gradient(tuple(values)).at(t) == pytest.approx(naive_interpolation(values, t), abs=1e-9)


@given(st.lists(NUMBERS, min_size=1, max_size=7), DEPTHS)
def test_a_gradient_stays_between_its_values_and_meets_its_ends(values, t):
    gradient = Gradient(tuple(values))
    assert min(values) - 1e-9 <= gradient.at(t) <= max(values) + 1e-9
    assert gradient.at(0) == values[0]
    assert gradient.at(1) == values[-1]


def test_other_values_are_stepped():
    gradient = Gradient(("sum", "count", "sum"))
    assert [gradient.at(t) for t in (0, 0.49, 0.5, 0.99, 1)] == ["sum", "sum", "count", "count", "sum"]
    assert Gradient((True, False)).at(0.9) is True


FILTERS = st.one_of(st.none(), st.sampled_from(["mlp", "self_attn", "layers.3", "weight", "nowhere"]))


@given(
    st.lists(st.tuples(FILTERS, st.one_of(NUMBERS, st.lists(NUMBERS, min_size=2, max_size=4))), max_size=5),
    NAMES,
    DEPTHS,
)
def test_the_first_filter_that_is_part_of_the_name_wins(cases, name, t):
    globs = ["*" if f is None else f"*{glob.escape(f)}*" for f, _ in cases]
    values = [Gradient(tuple(v)) if isinstance(v, list) else v for _, v in cases]
    setting = Choice(tuple(map(Case, globs, values)))
    expected = None
    for substring, value in cases:
        if substring is None or name.find(substring) >= 0:
            expected = naive_interpolation(value, t) if isinstance(value, list) else value
            break
    found = evaluate(setting, name, t)
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-9))


@given(st.lists(st.sampled_from(["*.mlp.*", "lm_head*", "*", "model.layers.?.*", "*.weight"]), max_size=4), NAMES)
def test_globs_match_whole_names_and_cross_dots(globs, name):
    def naive(pattern, text):
        if not pattern:
            return not text
        if pattern[0] == "*":
            return any(naive(pattern[1:], text[i:]) for i in range(len(text) + 1))
        return bool(text) and pattern[0] in ("?", text[0]) and naive(pattern[1:], text[1:])

    expected = next((i for i, glob in enumerate(globs) if naive(glob, name)), None)
    assert evaluate(Choice(tuple(Case(g, i) for i, g in enumerate(globs))), name, 0.5) == expected
    assert all(matches(glob, name) == naive(glob, name) for glob in globs)
