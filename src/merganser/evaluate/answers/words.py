"""Numbers written as English words."""

from __future__ import annotations

import re
from fractions import Fraction

_SMALL = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50,
    "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip
_LARGE = {"hundred": 100, "thousand": 1000, "million": 10**6}
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fifth": 5}
_PART = re.compile(rf"(?:an?\s+|one\s+)?({'|'.join(_PARTS)})(?:\s+of\s+.*)?", re.IGNORECASE)
_WORD = "|".join(sorted([*_SMALL, *_LARGE], key=len, reverse=True))
_RUN = re.compile(rf"\b(?:{_WORD})(?:[\s-]+(?:and\s+)?(?:{_WORD}))*\b", re.IGNORECASE)


def read_words(text: str) -> tuple[Fraction, ...]:
    """Return the value of the last number written in words, as a single reading; else nothing.

    Args:
        text: A text without digits.

    Returns:
        One value, or none.

    Example:
        >>> read_words("She needs twenty-one of them.")
        (Fraction(21, 1),)
    """
    runs = _RUN.findall(text)
    if not runs:
        part = _PART.fullmatch(text.strip(" \n.!"))
        return (Fraction(1, _PARTS[part[1].lower()]),) if part else ()
    total, current = 0, 0
    for word in re.findall(_WORD, runs[-1].lower()):
        if word in _SMALL:
            current += _SMALL[word]
        elif word == "hundred":
            current = max(current, 1) * 100
        else:
            total, current = total + max(current, 1) * _LARGE[word], 0
    return (Fraction(total + current),)
