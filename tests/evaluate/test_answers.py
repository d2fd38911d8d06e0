"""Replies as models write them, judged by value: a labelled set, and properties of the parts."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merganser.errors import MissingExtraError
from merganser.evaluate.answers.choices import find_choice, read_choice
from merganser.evaluate.answers.judging import holds_number, is_right
from merganser.evaluate.answers.marks import cut, find_marked
from merganser.evaluate.answers.normalizing import normalize
from merganser.evaluate.answers.numbers import find_quantities

REPLIES = [json.loads(line) for line in (Path(__file__).parent / "replies.jsonl").read_text("utf-8").splitlines()]
#: What is misjudged: without a mark the last number counts, and it is not always the answer.
MISSES = {
    "x = 2 or x = 3",
    "$x = 3$ and $y = 4$",
    "Answer: 3 hours and 20 minutes, i.e. 200 minutes",
    "She paid three quarters of $80, that is sixty dollars.",
    "They each get four slices of the 12.",
    "I need 18 more, since 2 of the 20 are done.",
    "It takes 18 days with 3 workers.",
    "She will be 30 years old in 2030.",
    "45 students, i.e. 3 classes",
    "18 = 9 * 2",
    "more than 4",
    "十八",
    "\\sqrt{2}",
}


def judged(case):
    reply = cut(case["reply"], ["\nQuestion:"])
    if case["kind"] == "number":
        return is_right(reply, case["answer"])
    options = case.get("options", ())
    return find_choice(reply, options) == read_choice(case["answer"], options)


def test_of_the_labelled_replies_98_in_100_are_judged_right_and_the_misses_are_known():
    wrong = {case["reply"] for case in REPLIES if judged(case) != case["right"]}
    assert len(REPLIES) >= 150
    assert wrong == MISSES
    assert len(wrong) <= 0.02 * len(REPLIES)


numbers = st.decimals(min_value=-(10**9), max_value=10**9, places=2, allow_nan=False)


def written(number: Decimal, thousands: str, point: str) -> str:
    return f"{number:,.2f}".replace(",", "_").replace(".", point).replace("_", thousands)


@given(
    numbers, st.sampled_from([(",", "."), (".", ","), (" ", ","), ("'", "."), ("\u202f", ","), ("", "."), ("", ",")])
)
def test_a_number_is_the_same_in_every_locale(number, locale):
    assert is_right(f"The total comes to {written(number, *locale)} euros.", str(number))


@given(st.integers(-(10**9), 10**9), st.sampled_from(["٠", "۰", "０", "०", "𝟎"]))
def test_digits_of_every_script_count(number, zero):
    text = "".join(chr(ord(zero) + int(c)) if c.isdigit() else c for c in str(number))
    assert is_right(text, str(number))


@given(
    st.fractions(max_denominator=50),
    st.sampled_from(["{n}/{d}", r"\frac{{{n}}}{{{d}}}", r"\boxed{{\dfrac{{{n}}}{{{d}}}}}"]),
)
def test_fractions_are_compared_by_value(value, form):
    text = form.format(n=value.numerator * 3, d=value.denominator * 3)
    assert is_right(text, f"{value.numerator}/{value.denominator}")
    assert not is_right(text, f"{value.numerator + 1}/{value.denominator}")


@given(numbers, numbers)
def test_another_value_is_another_answer(left, right):
    assert is_right(f"{left}", f"{right}") == (left == right)


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text):
    is_right(text, "18")
    find_choice(text, ["yes", "no"])
    for quantity in find_quantities(normalize(text)):
        assert quantity.readings


@pytest.mark.parametrize(
    "text", ["9" * 100_000, "1," * 50_000, "10^999999999", "1e999999999", "1/" * 20_000, "(" * 50_000]
)
def test_babble_takes_no_time_and_is_no_answer(text):
    assert not is_right(text, "18")
    assert find_choice(text, count=4) is None


def test_marks_come_before_numbers_and_the_last_of_a_sort_counts():
    text = "The answer is 3. #### 4\n\\boxed{5} and \\boxed{\\frac{1}{2}}"
    assert find_marked(text) == ["\\frac{1}{2}", "5", "4", "3"]


def test_replies_end_where_the_next_question_begins():
    reply = "\nQuestion: is what I was asked. It is 18.\nQuestion: And 3 + 4? Answer: 7"
    assert cut(reply, ["\nQuestion:"]).endswith("18.")
    assert cut("18", ["\nQuestion:"]) == "18"
    assert cut("18 stop", []) == "18 stop"


def test_readings_of_separators():
    def readings(text):
        return find_quantities(text)[0].readings

    assert readings("1,234") == (Fraction(1234), Fraction("1.234"), ("list", Fraction(1), Fraction(234)))
    assert readings("1.234") == (Fraction("1.234"), Fraction(1234))
    assert readings("1.234,5") == (Fraction("1234.5"),)
    assert readings("10-15") == (("range", Fraction(10), Fraction(15)),)


@pytest.mark.parametrize(
    "formula",
    [
        "2\\sqrt{3}",
        "x^2+1",
        "3x + 5",
        r"\frac{x}{2}",
        r"\frac{\pi}{4}",
        "2π",
        "3+4i",
        "x > 3",
        r"(-\infty, 3]",
        "n(n+1)/2",
    ],
)
def test_a_number_in_a_formula_is_not_its_value(formula):
    numbers = [str(quantity.readings[0]) for quantity in find_quantities("1 2 3 4 5 6")]
    assert not holds_number(formula)
    assert not holds_number(f"A worked solution in 12 words or more, with 3 and 4. \\boxed{{{formula}}}")
    assert not any(is_right(f"\\boxed{{{formula}}}", number) for number in numbers)


@given(st.fractions(max_denominator=9), st.fractions(max_denominator=9))
def test_the_order_counts_in_brackets_alone(x, y):
    assert is_right(f"\\boxed{{({x}, {y})}}", f"({x}, {y})")
    assert is_right(f"\\boxed{{({y}, {x})}}", f"({x}, {y})") == (x == y)
    assert is_right(f"{y} and {x}", f"{x}, {y}")


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_what_a_reply_denies_is_not_its_answer(right, wrong):
    for reply in (
        f"The answer is not {wrong} but {right}.",
        f"It is {right}, not {wrong}.",
        f"Not {wrong}. #### {right}",
    ):
        assert is_right(reply, str(right))
        assert is_right(reply, str(wrong)) == (right == wrong)
    assert not is_right(f"The answer is not {wrong}.", str(wrong))


@given(
    st.integers(-99, 99), st.sampled_from(["<think>{}</think>{}", "{}</think>\n\n{}", "<thinking>\n{}</thinking>\n{}"])
)
def test_thoughts_are_no_reply(number, form):
    assert is_right(cut(form.format("The answer is 1000. \\boxed{1000}", number), ["\nQuestion:"]), str(number))
    assert cut(f"<think>The answer is {number}", ["\nQuestion:"]) == ""


def test_reference_letters():
    assert [read_choice(a) for a in ("C", "(c)", 2, "2", "c.")] == ["C"] * 5
    assert read_choice("Rome", ["Paris", "Rome"]) == "B"
    assert [read_choice(a, ["x", "y"]) for a in ("C", 2, -1, True, "z", "")] == [None] * 6


def test_formulas_need_math_verify():
    assert not holds_number("\\sqrt{x}")
    try:
        import math_verify  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match=r"not a number; to compare formulas.*merganser\[math\]"):
            is_right("\\boxed{\\sqrt{x}}", "\\sqrt{x}")
    else:
        assert is_right("$\\boxed{x^{1/2}}$", "$\\sqrt{x}$")
        assert is_right("The answer is \\boxed{2\\sqrt{3}}.", "\\sqrt{12}")
        assert not is_right("The answer is \\boxed{3}.", "2\\sqrt{3}")
        assert is_right("\\frac{x}{2}", "\\frac{x}{2}")


@pytest.mark.parametrize(
    "noise", ["\n", " \n", "\t", "- ", "1.\n", "step ", "**", "$", "final ", "answer: ", r"\boxed x "]
)
def test_long_empty_replies_are_judged_at_once(noise):
    """Broken merges often repeat one token up to the limit."""
    began = time.process_time()
    assert not is_right(noise * 3000 + "x", "5")
    assert find_choice(noise * 3000 + "x") is None
    assert time.process_time() - began < 2


@pytest.mark.parametrize("phrase", ["the answer is 5 ", "答案是5", "Answer: ", r"\boxed 5 ", "#### 5 ", "<answer>5"])
def test_marked_parts_do_not_overlap(phrase):
    text = phrase * 1000
    assert sum(map(len, find_marked(text))) <= len(text)


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"\boxed{\boxed{5}", ["5"]),
        (r"\boxed{\frac{1}{2}} } \boxed{7}", ["7", r"\frac{1}{2}"]),
        (r"\boxed{1 + \boxed{2}}", ["2", r"1 + \boxed{2}"]),
        (r"} \boxed{6", []),
        (r"\boxed{" * 100_000 + "8}", ["8"]),
    ],
)
def test_boxes_end_at_their_own_brace(text, boxes):
    assert find_marked(text) == boxes
