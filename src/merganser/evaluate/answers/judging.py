"""Decide whether a reply gives the reference answer."""

from __future__ import annotations

import re
from typing import Any

from merganser.errors import MissingExtraError, require
from merganser.evaluate.answers.formulas import is_formula
from merganser.evaluate.answers.marks import find_bold, find_marked, is_denied
from merganser.evaluate.answers.normalizing import normalize
from merganser.evaluate.answers.numbers import Reading, as_list, as_tuple, find_quantities, share_reading
from merganser.evaluate.answers.words import read_words

_EQUATION = re.compile(r"[^=\n]*=")
#: What may precede the equals sign of an answer written as an equation.
_TERMS = re.compile(r"(?:[\d\s.,:+\-*/×÷^()$€£¥%{}\[\]°]|\b[a-zA-Z]\b|\\\w+)*")
#: A calculation in brackets after its result, as in `15 apples (5 + 10)`.
_ASIDE = re.compile(r"(\d[^\d\n().]{0,24}\.?\s?)\([\d\s.,+\-*/×÷=$€£%]*[+*/×÷=][\d\s.,+\-*/×÷=$€£%]*\)")
#: Numbers of a list's entries and of steps.
_ENTRIES = re.compile(r"^(?:[^\w\n]*step\s+|[^\S\n]*)(\d{1,2})(?:[.)](?=\s+\D)|:)", re.IGNORECASE | re.MULTILINE)
#: What follows an answer: a check of it, a note, an offer of help.
_AFTERTHOUGHT = re.compile(
    r"(?:^|\n)[^\w\n]*(?:(?:check|note|verification|proof)\W*:|let me know|feel free).*", re.IGNORECASE | re.DOTALL
)
#: Where an explanation begins after an answer.
_CLAUSE = re.compile(r",\s|\s[a-zA-Z]{3,}")
_ADJECTIVE = re.compile(r"-[a-z]{2}")
_FEW_WORDS = 4
#: A reference of more words is a worked solution, not a formula.
_MANY_WORDS = 8


def holds_number(answer: str) -> bool:
    """Return whether a reference answer can be compared by value; a formula cannot."""
    plain = normalize(answer)
    marked = find_marked(plain)
    alone = marked[0] if marked else plain
    formula = is_formula(alone) and (bool(marked) or len(_split_words(alone)) <= _MANY_WORDS)
    return not formula and bool(_read_answer(answer))


def load_verifier(answer: str) -> Any:
    """Return the package that compares formulas, `math-verify`.

    Args:
        answer: A reference answer that needs it.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        return require("math_verify", "math")
    except MissingExtraError as error:
        raise MissingExtraError(f"the answer {answer!r} is not a number; to compare formulas, {error}") from None


def is_right(reply: str, answer: str) -> bool:
    """Return whether the answer in a reply has the value of the reference answer.

    The reply's answer is what it marks as such (`\\boxed{}`, `####`, "the answer is"), else a number in bold, else its
    last number.

    Args:
        reply: The reply of a model, cut at its stop strings.
        answer: The reference: a number, or a worked solution that ends with (or marks) one.

    Returns:
        True if both have a value in common.

    Raises:
        MissingExtraError: If the reference is a formula, and the package to compare formulas is not installed.

    Example:
        >>> is_right("She makes **$1,234.50** a day at 2 markets.", "1234.5")
        True
    """
    return (
        share_reading(_read_answer(reply), _read_answer(answer))
        if holds_number(answer)
        else _is_same_expression(reply, answer)
    )


def _read_answer(text: str) -> tuple[Reading, ...]:
    """Return the readings of the answer in a text."""
    plain = normalize(text)
    for part in find_marked(plain):
        if found := _read_first(part):
            return found
    for part in find_bold(plain):
        if len(_split_words(part)) <= _FEW_WORDS and (found := _read_first(part)):
            return found
    alone = _ASIDE.sub(r"\1", _drop_entries(plain)).strip(" \n.$")
    before = _AFTERTHOUGHT.sub("", alone)
    return as_tuple(alone) or _read(before.strip("()[]{}"), last=True) or _read(alone.strip("()[]{}"), last=True)


def _drop_entries(text: str) -> str:
    """Return a text without the numbers of its list or steps, if they count up from 1."""
    numbers = [int(match[1]) for match in _ENTRIES.finditer(text)]
    counts = len(numbers) > 1 and numbers == list(range(1, len(numbers) + 1))
    return _ENTRIES.sub("", text) if counts else text


def _read_first(part: str) -> tuple[Reading, ...]:
    """Return readings of the answer at the beginning of a marked part; of `3 * 6 = 18`, the result."""
    while (equation := _EQUATION.match(part)) and _TERMS.fullmatch(part[: equation.end() - 1]):
        part = part[equation.end() :]
    if is_formula(_CLAUSE.split(part)[0]):
        return (("formula", part),)
    return as_tuple(part) or _read(part, last=False)


def _read(text: str, *, last: bool) -> tuple[Reading, ...]:
    """Return the readings of a list, else of the first or the last number that the text does not deny."""
    quantities = [each for each in find_quantities(text) if not is_denied(text, each.start)]
    if last:  # "5-day" and "3-hour" say what something is like, not how much it is
        quantities = [each for each in quantities if not _ADJECTIVE.match(text, each.end)] or quantities
    if not quantities:
        return () if find_quantities(text) else read_words(text)
    return as_list(text, quantities) or quantities[-1 if last else 0].readings


def _split_words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text)


def _is_same_expression(reply: str, answer: str) -> bool:
    verify = load_verifier(answer)
    expected, found = (
        verify.parse(text if find_marked(text) or "$" in text else f"${text}$") for text in (answer, reply)
    )
    return bool(verify.verify(expected, found))
