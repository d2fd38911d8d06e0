"""Patterns match what Python's match, and no pattern makes matching slow."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.checkpoints.patterns import Pattern

ATOMS = st.sampled_from(
    ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "1", "[0-9]", r"[\]a]", "^", "$", "-", "()"]
)
REPEATS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{1,}", "{,2}", "*?", "+?", "??"])


def grouped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    wrapped = st.builds("({}{}){}".format, st.sampled_from(["", "?:"]), inner, REPEATS)
    return wrapped | st.lists(inner, min_size=1, max_size=3).map("".join) | st.builds("{}|{}".format, inner, inner)


PATTERNS = st.recursive(st.builds("{}{}".format, ATOMS, REPEATS), grouped, max_leaves=8)


@settings(max_examples=400)
@given(PATTERNS, st.text(alphabet="ab1.-]\n", max_size=6))
def test_patterns_match_what_pythons_do(pattern: str, text: str) -> None:
    if "$" in pattern and text.endswith("\n"):
        return  # Python's end is also before a last line break
    try:
        expected = re.fullmatch(pattern, text) is not None
    except re.error:
        with pytest.raises(ValueError, match="nothing to repeat|repetition"):
            Pattern(pattern)
        return
    assert Pattern(pattern).matches(text) == expected


REFUSED = [
    "(",
    ")",
    "a)",
    "(a",
    "*",
    "a**",
    "^*",
    "a{3,2}",
    "[",
    "[z-a]",
    "\\",
    r"(a)\1",
    "(?=a)",
    "(?<!a)b",
    "(?i)a",
    "a++",
]
LARGE = ["a{9999}{9999}", "((a{999}){999}){999}", "((){999}){999}", "a" * 3000, "(" * 400 + "a" + ")" * 400]


@pytest.mark.parametrize("pattern", [*REFUSED, *LARGE, r"\bq", "(?P<x>a)"])
def test_what_cannot_be_matched_in_linear_time_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Pattern(pattern).matches("a")


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a*)*b", "(.*)*(.*)*(.*)*b", "(a|aa)+b", "a{0,9}" * 9 + "b"])
def test_patterns_that_explode_do_not(pattern: str) -> None:
    assert not Pattern(pattern).matches("a" * 500)
    assert Pattern(pattern).matches("a" * 50 + "b")


def test_long_texts_are_given_up() -> None:
    with pytest.raises(ValueError, match="too large for the names"):
        Pattern("(a|a|a|a)*b").matches("a" * 10_000_000)
