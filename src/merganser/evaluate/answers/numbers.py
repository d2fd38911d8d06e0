"""Numbers in text, by value: separators of several locales, fractions, powers, percentages, times, ranges, lists.

Text can often be read in more than one way (`1,234` may be a thousand or a decimal; `25%` is 25 or 0.25). A quantity
therefore has several readings, and two quantities are equal if they share one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

#: A number; or a tag and numbers: ("time", minutes), ("ratio", a/b), ("range", a, b), ("list", …), ("tuple", …); or
#: ("formula", text), which equals no number.
Reading: TypeAlias = "Fraction | tuple[str | Fraction, ...]"

#: Largest exponent that is computed: replies may contain 10^999999999.
MAX_EXPONENT = 300
#: Maximum number of characters of a number; longer ones are noise.
MAX_LENGTH = 400
_GROUPED = re.compile(r"\d{1,3}(?:([.,' ])\d{3})(?:\1\d{3})*(?:(?!\1)[.,]\d+)?")
_INDIAN = re.compile(r"\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?")
_SCALES = {
    "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "lakh": 10**5, "crore": 10**7,
    "k": 10**3, "dozen": 12, "万": 10**4, "萬": 10**4, "億": 10**8, "亿": 10**8, "千": 10**3,
    "mil": 10**3, "millones": 10**6, "millions": 10**6, "milioni": 10**6, "tausend": 10**3, "mille": 10**3,
}  # fmt: skip
_CURRENCY = r"(?:[$€£¥₹₩₽฿]|\b(?:Rs\.?|US\$?|USD|EUR|GBP|CHF|R\$|NT\$|HK\$|A\$|C\$))"
_PLAIN = r"(?:\d{1,3}(?:[.,' ]\d{3})+(?![\d])(?:[.,]\d+)?|\d+(?:[.,]\d+)*|\.\d+)"
_SCALE = r"(?:\s?(?:" + "|".join(sorted(map(re.escape, _SCALES), key=len, reverse=True)) + r")(?![a-zA-Z]))"
_QUANTITY = re.compile(
    rf"""
    (?<![A-Za-z0-9_^.,±]) (?<!±\s)
    (?P<sign>(?:(?<![\d)\]%]\s)(?<![\d)\]%])-\s?)?) (?P<currency>{_CURRENCY}\s?)? (?P<inner>-?)
    (?:
        (?P<clock>\d{{1,2}}:\d{{2}}(?::\d{{2}})?)(?:\s?(?P<half>[aApP]\.?[mM]\b\.?))?
      | (?P<ratio>\d+(?::|\s:\s)\d+)(?!\d)
      | (?P<hour>\d{{1,2}})\s?(?P<noon>[aApP]\.?[mM]\b\.?)
      | (?P<mixed>\d+)\s+(?P<mixed_top>\d+)\s?/\s?(?P<mixed_bottom>\d+)
      | (?P<top>{_PLAIN})\s?/\s?(?P<bottom>{_PLAIN})
      | (?P<mantissa>{_PLAIN})\s?[*x×]\s?10\s?\^\s?\{{?\s?(?P<power>-?\d+)\}}?
      | (?P<root>{_PLAIN})\s?\^\s?\{{?\s?(?P<exponent>-?\d+)\}}?
      | (?P<number>{_PLAIN})(?:[eE](?P<scientific>[+-]?\d+))?(?P<scale>{_SCALE})?
    )
    (?P<percent>\s?(?:%|percent\b|per\ cent\b|Prozent\b|por\ ciento\b))?
    """,
    re.VERBOSE,
)  # fmt: skip
_DASH = re.compile(r"\s?(?:-|to|bis|〜|~)\s?", re.IGNORECASE)
_ENTRY = r"-?\d+(?:\.\d+)?(?:\s?/\s?\d+)?"
_TUPLE = re.compile(rf"[(\[]\s*({_ENTRY}(?:\s*,\s*{_ENTRY})+)\s*[)\]]")
_THOUSANDS = re.compile(r".\d{1,3}(?:,\d{3})+.")
#: A number beside a root or π is part of a formula.
_FACTOR_BEFORE, _FACTOR_AFTER = re.compile(r"(?:√|\\sqrt)\s*[{(]?\s*$"), re.compile(r"\s?(?:π|√|\\pi\b|\\sqrt)")
_COMMA = re.compile(r"\s*(?:,|;|and|or|und|oder|y|et|ou)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Quantity:
    """A number in a text: its possible values, most likely first, and its place."""

    readings: tuple[Reading, ...]
    start: int
    end: int


def find_quantities(text: str) -> list[Quantity]:
    """Return the quantities of a normalised text in their order; a range such as `10-15` is one quantity.

    Args:
        text: A text from `normalize`.

    Returns:
        Every quantity with its readings and its place in the text.

    Example:
        >>> [q.readings[0] for q in find_quantities("3 boxes of 1,234.50")]
        [Fraction(3, 1), Fraction(2469, 2)]
    """
    single = list(_find_single(text))
    found: list[Quantity] = []
    position = 0
    while position < len(single):
        here = single[position]
        if position + 1 < len(single):
            after = single[position + 1]
            between = text[here.end : after.start]
            spoken = between.strip() == "and" and text[: here.start].rstrip().lower().endswith("between")
            alike = isinstance(here.readings[0], Fraction) == isinstance(after.readings[0], Fraction)
            if alike and (spoken or _DASH.fullmatch(between)):
                ends = tuple(part for q in (here, after) for part in _flatten(q.readings[0]))
                found.append(Quantity((("range", *ends),), here.start, after.end))
                position += 2
                continue
        found.append(here)
        position += 1
    return found


def as_list(text: str, quantities: list[Quantity]) -> tuple[Reading, ...]:
    """Return the reading of `2, 3 and 5` as a list; nothing if there is other text between the quantities."""
    between = [text[a.end : b.start] for a, b in pairwise(quantities)]
    if len(quantities) < 2 or not all(_COMMA.fullmatch(part) for part in between):
        return ()
    members = [quantity.readings[0] for quantity in quantities]
    numbers = [member for member in members if isinstance(member, Fraction)]
    ordered: tuple[Reading, ...] = (("tuple", *numbers),) if len(numbers) == len(members) else ()
    return (_make_list(*members), *ordered)


def as_tuple(text: str) -> tuple[Reading, ...]:
    """Return the reading of `(3, 4)`, a point or an interval, whose order counts; nothing for other texts.

    Example:
        >>> as_tuple("(1/2, 3)")
        (('tuple', Fraction(1, 2), Fraction(3, 1)),)
    """
    text = text.strip(" $")
    match = _TUPLE.fullmatch(text)
    if match is None or _THOUSANDS.fullmatch(text) or len(text) > MAX_LENGTH:
        return ()
    parts = [part.replace(" ", "") for part in match[1].split(",")]
    return () if any(re.search(r"/0+$", part) for part in parts) else (("tuple", *map(Fraction, parts)),)


def _make_list(*members: Reading) -> Reading:
    """Return a list reading that is independent of the order of its members."""
    numbers = [member for member in members if isinstance(member, Fraction)]
    return ("list", *sorted(numbers)) if len(numbers) == len(members) else ("list", *map(str, members))


def share_reading(left: tuple[Reading, ...], right: tuple[Reading, ...]) -> bool:
    """Return whether two quantities share a reading; repeating decimals may be rounded to two decimals or more."""
    return any(a == b or _is_rounded(a, b) or _is_rounded(b, a) for a in left for b in right)


def _is_rounded(value: Reading, exact: Reading) -> bool:
    """Return whether `value` is `exact`, a fraction with a repeating decimal expansion, rounded to two decimals or
    more.
    """
    if not isinstance(value, Fraction) or not isinstance(exact, Fraction):
        return False
    if not _is_repeating(exact) or _is_repeating(value) or value.denominator == 1:
        return False
    places = next(n for n in range(1, 5000) if (value * 10**n).denominator == 1)
    return places >= 2 and abs(value - exact) <= Fraction(1, 2 * 10**places)


def _is_repeating(value: Fraction) -> bool:
    rest = value.denominator
    if rest.bit_length() > 5000:
        return False
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest > 1


def _find_single(text: str) -> Iterator[Quantity]:
    for match in _QUANTITY.finditer(text):
        if _FACTOR_AFTER.match(text, match.end()) or _FACTOR_BEFORE.search(
            text[max(0, match.start() - 9) : match.start()]
        ):
            continue
        readings = _read_match(match, text)
        if readings:
            yield Quantity(tuple(dict.fromkeys(readings)), match.start(), match.end())


def _read_match(match: re.Match[str], text: str) -> list[Reading]:
    sign = -1 if match["sign"] or match["inner"] else 1
    if match["clock"] or match["hour"]:
        return _read_time(match)
    if match["ratio"]:
        left, right = (Fraction(part) for part in match["ratio"].split(":"))
        return [("ratio", left / right)] if right else []
    values: list[Fraction] = []
    if match["mixed"]:
        bottom = Fraction(match["mixed_bottom"])
        values = [Fraction(match["mixed"]) + Fraction(match["mixed_top"]) / bottom] if bottom else []
    elif match["top"]:
        values = [a / b for a in _read_digits(match["top"]) for b in _read_digits(match["bottom"]) if b]
    elif match["mantissa"]:
        values = [_raise_to(Fraction(10), match["power"], value) for value in _read_digits(match["mantissa"])]
    elif match["root"]:
        values = [_raise_to(value, match["exponent"]) for value in _read_digits(match["root"]) if value]
    else:
        scale = _SCALES.get((match["scale"] or "").strip(), 1)
        values = [_raise_to(Fraction(10), match["scientific"] or "0", v) * scale for v in _read_digits(match["number"])]
    found: list[Reading] = [sign * value for value in values]
    if match["percent"]:
        found += [sign * value / 100 for value in values]
    if match["number"] and (parts := _read_list(match["number"])):
        found.append(_make_list(*(sign * part for part in parts)))
    return found


def _read_time(match: re.Match[str]) -> list[Reading]:
    """Return minutes since midnight; without am or pm, hours up to 12 may be either."""
    hour, *rest = map(int, (match["clock"] or match["hour"]).split(":"))
    minutes = 60 * hour + (rest[0] if rest else 0)
    seconds = Fraction(rest[1], 60) if len(rest) > 1 else Fraction(0)
    half = (match["half"] or match["noon"] or "").lower().replace(".", "")
    if half:
        found: list[Reading] = [("time", minutes % 720 + (720 if half == "pm" else 0) + seconds)]
        return [*found, Fraction(hour)] if match["hour"] else found
    return [("time", minutes + seconds), *([("time", minutes % 720 + 720 + seconds)] if hour <= 12 else [])]


def _read_digits(text: str) -> list[Fraction]:
    """Return the possible values of digits with separators: `1,234` a thousand or a decimal, `1.234,50` just one."""
    if len(text) > MAX_LENGTH:
        return []
    if _INDIAN.fullmatch(text):
        return [Fraction(text.replace(",", ""))]
    grouped = _GROUPED.fullmatch(text)
    marks = [c for c in text if not c.isdigit()]
    if grouped:
        mark = grouped[1]
        whole = Fraction(text.replace(mark, "").replace(",", "."))
        # Nobody writes zeros after a decimal comma, as calculators do after a point.
        ambiguous = len(marks) == 1 and (mark == "." or (mark == "," and not text.endswith(",000")))
        decimal = [Fraction(text.replace(",", "."))] if ambiguous else []
        # A point before three digits is usually a decimal point, a comma usually a thousands separator.
        return [*decimal, whole] if mark == "." and len(marks) == 1 else [whole, *decimal]
    if len(marks) <= 1:
        return [Fraction(text.replace(",", "."))]
    if len(set(marks[:-1])) == 1 and marks[-1] != marks[0] and len(marks) == 2:
        return [Fraction(text.replace(marks[0], "").replace(",", "."))]
    return []


def _read_list(text: str) -> tuple[Fraction, ...]:
    """Return the members of `17,18` and `1,2,3`, which may be a list."""
    parts = text.split(",") if len(text) <= MAX_LENGTH else []
    return tuple(map(Fraction, parts)) if len(parts) > 1 and all(part.isdigit() for part in parts) else ()


def _raise_to(base: Fraction, exponent: str, factor: Fraction | int = 1) -> Fraction:
    """Return factor · base^exponent; if that is too large to compute, a value that equals no written number."""
    n = int(exponent) if len(exponent) < 6 else MAX_EXPONENT + 1
    if abs(n) > MAX_EXPONENT or base.numerator.bit_length() > 256:
        return Fraction(-1, 7**50)
    return factor * base**n if base or n >= 0 else Fraction(0)


def _flatten(reading: Reading) -> tuple[str | Fraction, ...]:
    return (reading,) if isinstance(reading, Fraction) else reading
