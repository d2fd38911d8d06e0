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
_LARGE = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5}
_PART = rf"(?P<part>{'|'.join(_PARTS)})s?"
_PART_ALONE = re.compile(rf"(?:an?\s+)?{_PART}(?:\s+of\s+.*)?", re.IGNORECASE)
_NOTHING = re.compile(r"\b(?:none|nothing|no\s[a-z]+)\s(?:is\s|are\s)?(?:left|remain)", re.IGNORECASE)
_WORD = "|".join(sorted([*_SMALL, *_LARGE], key=len, reverse=True))
_RUN = re.compile(
    rf"(?P<minus>\b(?:minus|negative)\s+)?\b(?P<whole>(?:{_WORD})(?:[\s-]+(?:and\s+)?(?:{_WORD}))*)\b"
    rf"(?:(?P<plus>\s+and)?(?:\s+an?|\s+one)?[\s-]+{_PART}\b)?",
    re.IGNORECASE,
)


def read_words(text: str) -> tuple[Fraction, ...]:
    """Return the value of the last number written in words, as a single reading; else nothing.

    Args:
        text: A text without digits.

    Returns:
        One value, or none.

    Example:
        >>> read_words("She needs twenty-one of them.")
        (Fraction(21, 1),)
        >>> read_words("minus two and a half")
        (Fraction(-5, 2),)
    """
    found = list(_RUN.finditer(text))
    if not found:
        if _NOTHING.search(text):
            return (Fraction(0),)
        part = _PART_ALONE.fullmatch(text.strip(" \n.!"))
        return (Fraction(1, _PARTS[part["part"].lower()]),) if part else ()
    run = found[-1]
    value = _read_whole(run["whole"])
    if run["part"]:
        share = Fraction(1, _PARTS[run["part"].lower()])
        value = value + share if run["plus"] else value * share
    subtracted = len(found) > 1 and not text[found[-2].end() : run.start()].strip()
    return (-value if run["minus"] and not subtracted else value,)


def _read_whole(words: str) -> Fraction:
    total, current = 0, 0
    for word in re.findall(_WORD, words.lower()):
        if word in _SMALL:
            current += _SMALL[word]
        elif word == "hundred":
            current = max(current, 1) * 100
        else:
            total, current = total + max(current, 1) * _LARGE[word], 0
    return Fraction(total + current)
