"""Decide whether a reply gives the reference answer."""

from __future__ import annotations

import re

from merganser.errors import MissingExtraError, require
from merganser.evaluate.answers.marks import find_bold, find_marked
from merganser.evaluate.answers.normalizing import normalize
from merganser.evaluate.answers.numbers import Reading, as_list, find_quantities, same
from merganser.evaluate.answers.words import read_words

_EQUATION = re.compile(r"[^=\n]*=")
#: What may precede the equals sign of an answer written as an equation.
_TERMS = re.compile(r"(?:[\d\s.,:+\-*/×÷^()$€£¥%{}\[\]°]|\b[a-zA-Z]\b|\\\w+)*")
#: A calculation in brackets after its result, as in `15 (5 + 10)`.
_ASIDE = re.compile(r"(?<=\d)\s*\([\d\s.,+\-*/×÷=$€£%]*[+*/×÷=][\d\s.,+\-*/×÷=$€£%]*\)")
_FEW_WORDS = 4


def holds_number(answer: str) -> bool:
    """Return whether a reference answer can be compared by value."""
    return bool(_readings(answer))


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
    expected = _readings(answer)
    return same(_readings(reply), expected) if expected else _same_expression(reply, answer)


def _readings(text: str) -> tuple[Reading, ...]:
    """Return the readings of the answer in a text."""
    plain = normalize(text)
    for part in find_marked(plain):
        if found := _first(part):
            return found
    for part in find_bold(plain):
        if len(re.findall(r"[^\W\d_]+", part)) <= _FEW_WORDS and (found := _first(part)):
            return found
    alone = _ASIDE.sub("", plain).strip(" \n.()[]{}$")
    quantities = find_quantities(alone)
    if not quantities:
        return read_words(alone)
    return as_list(alone, quantities) or quantities[-1].readings


def _first(part: str) -> tuple[Reading, ...]:
    """Return readings of the answer at the beginning of a marked part; of `3 * 6 = 18`, the result."""
    while (equation := _EQUATION.match(part)) and _TERMS.fullmatch(part[: equation.end() - 1]):
        part = part[equation.end() :]
    quantities = find_quantities(part)
    if not quantities:
        return read_words(part)
    return as_list(part, quantities) or quantities[0].readings


def _same_expression(reply: str, answer: str) -> bool:
    """Compare formulas with `math-verify`."""
    try:
        verify = require("math_verify", "math")
    except MissingExtraError as error:
        raise MissingExtraError(f"the answer {answer!r} is not a number; to compare formulas, {error}") from None
    return bool(verify.verify(verify.parse(answer), verify.parse(reply)))
