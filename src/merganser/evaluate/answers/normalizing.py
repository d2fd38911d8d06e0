"""Normalise the many ways in which replies write the same characters."""

from __future__ import annotations

import math
import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_MINUS = str.maketrans(dict.fromkeys("−﹣－‐‑‒–—", "-"))
_SPACES = str.maketrans(dict.fromkeys("\u00a0\u202f\u2009\u2007\u2008", " "))
#: Decimal and thousands separators, percent sign and full-width punctuation of other scripts.
_SIGNS = str.maketrans({"٫": ".", "٬": ",", "٪": "%", "∕": "/", "⁄": "/", "：": ":", "，": ",", "．": ".", "。": ".\n"})


def normalize(text: str) -> str:
    """Return `text` with ASCII digits, signs and separators, and without LaTeX's spacing and styling.

    Args:
        text: A reply, or a reference answer.

    Returns:
        The text in which every decimal digit is one of 0–9, every dash a hyphen-minus, superscripts are `^n` and
        vulgar fractions are `a/b`.

    Example:
        >>> normalize("１８ ㎡, −½")
        '18 m2, - 1/2'
    """
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: "^" + match[0].translate(_SUPERSCRIPTS), text)
    text = "".join(f" {unicodedata.normalize('NFKC', c)}" if _is_vulgar(c) else c for c in text)
    text = unicodedata.normalize("NFKC", text.translate(_SIGNS).translate(_MINUS)).translate(_SPACES)
    text = "".join(str(unicodedata.digit(c)) if unicodedata.category(c) == "Nd" else c for c in text.translate(_SIGNS))
    text = re.sub(r"[\u200b-\u200f\u202a-\u202e\u2060\u2066-\u2069]", "", text)
    text = _MILLIONS.sub(lambda match: f"{match[1]} {'million' if match[2] else 'billion'}", text)
    return _simplify_latex(_AND_A_HALF.sub(" 1/2", _SPOKEN_MINUS.sub("-", text)))


#: A sign in words; after a number, "minus" is a subtraction.
_SPOKEN_MINUS = re.compile(r"(?<![\d%)\]]\s)\b(?:minus|negative)\s+(?=[$€£¥]?\d)", re.IGNORECASE)
#: Amounts of money such as `$5M`; elsewhere the letters may be units.
_MILLIONS = re.compile(r"([$€£¥₹]\s?\d[\d.,]*)\s?(?:([Mm]n?)|(?:B|bn))\b")
_AND_A_HALF = re.compile(r"(?<=\d) and (?:a|one)[ -]half\b", re.IGNORECASE)


def _is_vulgar(character: str) -> bool:
    return unicodedata.decomposition(character).startswith("<fraction>")


_COMMAND_WITH_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*(-?[\d.,]+)\s*\}")
_ROOT = re.compile(r"(?<![\w})])\s*\\sqrt\s*\{\s*(\d{1,12})\s*\}")
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)")


def _simplify_latex(text: str) -> str:
    if "\\" not in text and "{,}" not in text:
        return text
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"\\[,!;: ]|\\q?quad\b|\\left\b|\\right\b|\\displaystyle\b", "", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "°", text)
    text = re.sub(r"\\(?:times|cdot)\b", "*", text)
    text = _COMMAND_WITH_TEXT.sub(r" \1", text)
    text = _FRACTION.sub(r" \1/\2", text)
    text = _SHORT_FRACTION.sub(r" \1/\2", text)
    text = _ROOT.sub(_resolve_root, text)
    return re.sub(r"\\[()\[\]]", " ", text)


def _resolve_root(match: re.Match[str]) -> str:
    root = math.isqrt(int(match[1]))
    return f" {root}" if root**2 == int(match[1]) else match[0]
