"""Letters of multiple choice in free text: "(C) because (A) is wrong", "b", "Answer: B."."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from merganser.evaluate.answers.marks import find_bold, find_marked, is_denied
from merganser.evaluate.answers.normalizing import normalize

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
#: Words before a letter that announce a choice.
_PREFIX = r"(?:option|choice|answer|opci[oó]n|option|antwort|选项|選択肢)?\s*"
_CONCLUDED = re.compile(
    r"\b(?:therefore|thus|hence|so|it'?s|must be|say|choose|pick|select|go with|going with)\b[\s,:]*"
    r"(?:(?:the answer|it|that)?\s*(?:is|must be|leaves)\s+)?(?:option\s+)?"
    r"[(\[\"'*]*([a-z])[)\]\"'*]*\s*(?:[.,;!\n(]|$)",
    re.I,
)
#: Several letters at once do not choose one.
_UNDECIDED = re.compile(r"\b(?:both|either)\s+\(?[a-z]\)?\s+(?:and|or)\s+\(?[a-z]\)?(?!\w)", re.I)
_WRONG_AFTER = re.compile(r"[)\].:]?\s*(?:is|are|was)\s+(?:\w+\s+)?(?:wrong|incorrect|false|not|out)\b", re.I)


def find_choice(reply: str, options: Sequence[str] = (), count: int | None = None) -> str | None:
    """Return the letter that a reply chooses, or None.

    Args:
        reply: The reply of a model, cut at its stop strings.
        options: The texts of the options, if known; a reply that repeats one of them chooses it.
        count: The number of letters; by default as many as `options`, or ten.

    Returns:
        An upper-case letter.

    Example:
        >>> find_choice("(C) because (A) is wrong")
        'C'
    """
    letters = LETTERS[: count or len(options) or 10]
    text = normalize(reply).strip()
    for part in [*find_marked(text), *find_bold(text)]:
        found = _find_leading(part, letters) or _find_named(part, letters, last=False) or _find_repeated(part, options)
        if found:
            return found
    if concluded := _find_concluded(text, letters):
        return concluded
    if _UNDECIDED.search(text):
        return None
    return (
        _find_leading(text, letters)
        or _find_named(text, letters, last=True)
        or _find_repeated(text, options)
        or _find_alone(text, letters)
    )


def read_choice(answer: object, options: Sequence[str] = ()) -> str | None:
    """Return the letter of a reference answer: a letter, the index of an option, or its text.

    Args:
        answer: "C", "(c)", 2, or one of `options`.
        options: The texts of the options, if there are any.

    Returns:
        An upper-case letter, or None if `answer` is none of these.

    Example:
        >>> read_choice(2), read_choice("(b)"), read_choice("Rome", ["Paris", "Rome"])
        ('C', 'B', 'B')
    """
    count = len(options) or len(LETTERS)
    if isinstance(answer, bool):
        return None
    if isinstance(answer, int):
        return LETTERS[answer] if 0 <= answer < count else None
    text = str(answer).strip()
    if text in options:
        return LETTERS[list(options).index(text)]
    match = re.fullmatch(r"[(\[]?([A-Za-z])[)\].:]?", normalize(text).strip())
    if match:
        return match[1].upper() if match[1].upper() in LETTERS[:count] else None
    return LETTERS[int(text)] if text.isdigit() and int(text) < count else None


def _find_concluded(text: str, letters: str) -> str | None:
    """Return the last letter that ends a conclusion, as in "A is too small, so it must be B"."""
    found = [m[1].upper() for m in _CONCLUDED.finditer(text) if m[1].upper() in letters]
    return found[-1] if found else None


def _find_leading(text: str, letters: str) -> str | None:
    """Return a letter at the beginning: alone, in brackets, or before punctuation; the words `A` and `I` do not
    count.
    """
    text = text.lstrip(f"{string.whitespace}\"'`*$")
    match = re.match(rf"{_PREFIX}[\"'`*$]*([(\[]?)([A-Za-z])(?![A-Za-z0-9])([)\].:,;]|\*\*)?", text, re.I)
    if not match or match[2].upper() not in letters or _is_denied_around(text, match.start(2), match.end(2)):
        return None
    rest = text[match.end() :]
    marked = bool(match[1] or match[3])
    ends = (
        not rest.strip()
        or rest.lstrip(" \t")[:1] in "\n-=,;)\"'`*$"
        or rest[:1] > "\u3000"
        or re.match(r"\s*(?:because|since|as)\b", rest)
    )
    return match[2].upper() if marked or ends else None


def _find_named(text: str, letters: str, *, last: bool) -> str | None:
    """Return a letter in brackets, or called an option, that is not said to be wrong."""
    bracketed = rf"[(\[]([{letters}{letters.lower()}])[)\]]"
    pattern = rf"{bracketed}|\b(?:option|choice|选项|選択肢)\s*\"?([{letters}])\b|\b([{letters}])\)"
    found = [m for m in re.finditer(pattern, text) if not _is_denied_around(text, m.start(), m.end())]
    chosen = found[-1 if last else 0] if found else None
    return next(group for group in chosen.groups() if group).upper() if chosen else None


def _find_alone(text: str, letters: str) -> str | None:
    """Return the last upper-case letter that stands alone, except the words `A` and `I`."""
    found = [
        m[0]
        for m in re.finditer(rf"(?<![A-Za-z0-9_'])[{letters}](?![A-Za-z0-9_'])", text)
        if not _is_denied_around(text, m.start(), m.end())
        and not (m[0] in "AI" and re.match(r"\s+[a-z]", text[m.end() :]))
    ]
    return found[-1] if found else None


def _find_repeated(text: str, options: Sequence[str]) -> str | None:
    """Return the option a reply begins with, or the only one it contains; the longest of nested options."""
    said = _spell_words(text)
    known = {_spell_words(option): letter for letter, option in zip(LETTERS, options, strict=False)}
    held = [words for words in known if words.strip() and _is_affirmed(words, said)]
    first = [words for words in held if said.startswith(words)]
    longest = max(first or held, key=len, default="")
    return known[longest] if longest and (first or all(words in longest for words in held)) else None


def _is_affirmed(words: str, said: str) -> bool:
    """Return whether a text has these words at least once without denying them, as in "Paris, not London"."""
    return any(not is_denied(said, match.start() + 1) for match in re.finditer(re.escape(words), said))


def _spell_words(text: str) -> str:
    """Return the words of a text between single spaces, without an article at the beginning."""
    plain = re.sub(r"[\W_]+", " ", normalize(text).casefold()).strip()
    return f" {re.sub(r'^(?:the|an?) ', '', plain)} "


def _is_denied_around(text: str, start: int, end: int) -> bool:
    return is_denied(text, start) or bool(_WRONG_AFTER.match(text[end:]))
