"""Identify the language of a reply with `py3langid` (extra `language`)."""

from __future__ import annotations

import re

from merganser.errors import InputError, require

_CODE = re.compile(r"[a-z]{2,3}")
#: Text without a language: LaTeX commands and formulas, markup, digits and signs.
_SPEECHLESS = re.compile(r"\\[a-zA-Z]+|<<[^<>]*>>|<[^<>\n]{1,40}>|[\d_\W]+")


def check_language(code: str) -> None:
    """Refuse a text that is not an ISO 639-1 code, or a missing language identifier."""
    if not isinstance(code, str) or not _CODE.fullmatch(code):
        raise InputError(f"language: {code!r} is not a code such as en, ja or de")
    require("py3langid", "language")


def is_in_language(text: str, code: str) -> bool:
    """Return whether a reply is written in a language; false for a reply without words.

    Args:
        text: A reply.
        code: The language's code in ISO 639-1, such as "ja".

    Returns:
        True if it is the most likely language.

    Example:
        >>> is_in_language("Die Antwort lautet 18.", "de")  # doctest: +SKIP
        True
    """
    words = _SPEECHLESS.sub(" ", text).strip()
    return bool(words) and str(require("py3langid", "language").classify(words)[0]) == code
