"""Find the answer in a reply: `\\boxed{…}`, `<answer>…</answer>`, `#### …`, "the answer is …", or in bold."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Phrases that announce an answer, in the languages of translated benchmarks.
_PHRASES = (
    r"(?:the\s+|my\s+)?(?:(?:final|correct|right|best)\s+){0,3}(?:answer|choice|option|result|solution)[\"'*_`]*"
    r"(?:\s+to\s+(?:the|this)\s+(?:question|problem))?\s*(?:is|was|are|will\s+be|would\s+be|=|:)",
    r"(?:la\s+)?(?:respuesta|soluci[oó]n|resposta|risposta|r[eé]ponse|solution)(?:\s+(?:final|finale|correcta|corretta"
    r"|correcte|correta))?\s*(?:es|est|è|é|:|=)",
    r"(?:die\s+)?(?:antwort|l[oö]sung|ergebnis)\s*(?:ist|lautet|:|=)",
    r"(?:ответ|відповідь)\s*(?:-|:|=)?",
    r"(?:答え|解答|回答|正解)\s*(?:は|:|=)",
    r"(?:正确)?答案\s*(?:是|为|為|:|=)",
    r"(?:정답|답)\s*(?:은|는|:|=)",
    r"(?:الإجابة|الجواب)\s*(?:هي|هو|:|=)?",
)
_ANNOUNCED = re.compile("|".join(f"(?:{phrase})" for phrase in _PHRASES), re.IGNORECASE)
#: Where the reply of a reasoning model begins; its template may have opened the thoughts in the prompt.
_THOUGHTS_END = re.compile(r"</(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_THOUGHTS = re.compile(r"\s*<(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.IGNORECASE | re.DOTALL)
_DENIAL = re.compile(
    r"(?:\bnot|n't|neither|nor|rather than|instead of|except|unlike)\s*(?:the\s+)?(?:option\s*)?[$(\[]*$", re.I
)
_DENIAL_LENGTH = 40
_HASHES = re.compile(r"####\s*([^\n]*)")
_BOLD = re.compile(r"(\*\*|__)([^*\n]{1,60}?)\1")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")
_BARE_BOX_END = re.compile(r"\$|\\(?:boxed|fbox)")


def cut(text: str, stops: Sequence[str]) -> str:
    """Return a reply without thoughts (`<think>…</think>`), up to the first of the stop strings; one at the beginning
    does not count.

    Args:
        text: What a model wrote.
        stops: Strings that start something after the reply, such as the next question.

    Returns:
        The reply alone; empty if the thoughts never end.

    Example:
        >>> cut("18\\nQuestion: How many …", ["\\nQuestion:"])
        '18'
        >>> cut("<think>The answer is 16? No.</think>18", [])
        '18'
    """
    text = _THOUGHTS_END.split(text)[-1]
    if _THOUGHTS.match(text):
        return ""
    start = len(text) - len(text.lstrip())
    places = [place for stop in stops if stop and (place := text.find(stop, start)) >= 0]
    return text[: min(places)] if places else text


def find_marked(text: str) -> list[str]:
    """Return the marked parts of a reply, the most reliable first; the last of each kind comes first.

    Args:
        text: A reply, cut and normalised.

    Returns:
        The content of boxes, of answer tags, text after `####`, then text after an announcement, to the end of its
        sentence or to the next announcement.

    Example:
        >>> find_marked("The answer is 5. Wait.\\n#### 18 apples")
        ['18 apples', '5']
    """
    announced = []
    announcements = list(_ANNOUNCED.finditer(text))
    ends = [*(match.start() for match in announcements), len(text)][1:]
    for match, end in zip(announcements, ends, strict=True):
        following = text[match.end() : end].lstrip(" \t*:_`\"'")
        # An announcement may be on its own line, above the answer.
        line = following.lstrip().split("\n", 1)[0]
        if line.strip():
            announced.append(_cut_sentence(line))
    hashes = [match[1].strip() for match in _HASHES.finditer(text) if match[1].strip()]
    tagged = [match[1].strip() for match in _TAGGED.finditer(text) if match[1].strip()]
    return [part for kind in (_find_boxed(text), tagged, hashes, announced) for part in reversed(kind)]


def is_denied(text: str, start: int) -> bool:
    """Return whether a reply rejects what begins at `start`, as in "not 16"."""
    return bool(_DENIAL.search(text[max(0, start - _DENIAL_LENGTH) : start]))


def find_bold(text: str) -> list[str]:
    """Return text in bold, the last first, without headings (which end in a colon)."""
    return [found for match in reversed(list(_BOLD.finditer(text))) if not (found := match[2].strip()).endswith(":")]


def _find_boxed(text: str) -> list[str]:
    found = []
    ends = _find_closing_braces(text)
    for match in _BOX.finditer(text):
        if match[1] is None:
            end = _BARE_BOX_END.search(text, match.end())
            found.append(text[match.end() : end.start() if end else len(text)].strip())
        elif match.start(1) in ends:
            found.append(text[match.end() : ends[match.start(1)]].strip())
    return [each for each in found if each]


def _find_closing_braces(text: str) -> dict[int, int]:
    """Return the place of every opening brace that is closed -> the place where it is."""
    ends = {}
    unclosed: list[int] = []
    for match in re.finditer("[{}]", text):
        if match[0] == "{":
            unclosed.append(match.start())
        elif unclosed:
            ends[unclosed.pop()] = match.start()
    return ends


def _cut_sentence(line: str) -> str:
    """Return the line up to a full stop that ends a sentence, not one inside a number or an abbreviation."""
    end = re.search(r"(?<=[\w)%°$\"'*}\]])[.!?。](?=\s+[A-Z#\\(]|\s*$)", line)
    return line[: end.start()] if end else line
