"""Match untrusted regular expressions in time proportional to pattern and text.

Python's own engine tries alternatives one after another, and a pattern like `(a+)+b` can take years. Here all
alternatives advance together (Thompson's construction), so that no adapter config can make matching slow. Supports the
syntax that users of PEFT write: literals, `.`, `[…]`, `\\d \\w \\s`, groups, `|`, `* + ? {m,n}`, `^` and `$`. Other
syntax of Python (back-references, lookaround, flags) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

#: One token of a pattern.
_TOKEN = re.compile(
    r"(?P<repeat>[*+?]|\{\d{0,4}(?:,\d{0,4})?\})(?P<lazy>\??)"
    r"|(?P<open>\((?:\?:)?)|(?P<close>\))|(?P<either>\|)|(?P<edge>[\^$])"
    r"|(?P<atom>\[\^?\]?(?:\\.|[^\]\\])*\]|\\[dDwWsS]|\\[^0-9A-Za-z]|[^\\\[])",
    re.DOTALL,
)
#: Maximum number of states; a counted repetition needs its part once for each count.
_MAX_STATES = 2_000
_MAX_PATTERN = 1_000
_MAX_NESTING = 20
#: Maximum of letters times states over all texts of one pattern; adapters need thousands.
_MAX_STEPS = 2_000_000

#: An edge to `target`: by a letter that the test accepts, freely (`None`), at the start ("^") or at the end ("$").
_Test = Callable[[str], object] | str | None
_Edge = tuple[_Test, int]
_Part = Callable[[int], int]


class Pattern:
    """A compiled pattern.

    Example:
        >>> Pattern(r"layers\\.(0|1)\\..*").matches("layers.1.q_proj")
        True
    """

    def __init__(self, pattern: str) -> None:
        """Compile a pattern.

        Raises:
            ValueError: If the pattern is invalid, too long, or cannot be matched in linear time.
        """
        if len(pattern) > _MAX_PATTERN:
            raise ValueError(f"{len(pattern)} characters, more than {_MAX_PATTERN}")
        self._states: list[list[_Edge]] = [[]]  # the first state accepts
        self._steps = 0
        tokens = _Tokens(pattern)
        whole = self._parse_alternatives(tokens)
        if tokens.kind is not None:
            raise ValueError(f"an unmatched {tokens.text!r}")
        self._start = whole(0)

    def matches(self, text: str) -> bool:
        """Return whether the pattern matches the whole text.

        Raises:
            ValueError: If matching exceeds the limit of text and states.
        """
        reached = self._closure({self._start}, text, 0)
        for place, letter in enumerate(text):
            step = {
                target
                for state in reached
                for test, target in self._states[state]
                if callable(test) and test(letter) is not None
            }
            reached = self._closure(step, text, place + 1)
            self._steps += len(reached)
            if self._steps > _MAX_STEPS:
                raise ValueError("too large for the names it is matched with")
        return 0 in reached

    def _closure(self, states: set[int], text: str, place: int) -> set[int]:
        """Return the states and those reachable from them without a letter."""
        found, pending = set(states), list(states)
        while pending:
            for test, target in self._states[pending.pop()]:
                free = test is None or (test == "^" and place == 0) or (test == "$" and place == len(text))
                if free and target not in found:
                    found.add(target)
                    pending.append(target)
        return found

    def _state(self, *edges: _Edge) -> int:
        if len(self._states) >= _MAX_STATES:
            raise ValueError(f"more than {_MAX_STATES} states")
        self._states.append(list(edges))
        return len(self._states) - 1

    # A part of a pattern is a function from the state after it to its first state.

    def _parse_alternatives(self, tokens: _Tokens) -> _Part:
        options = [self._parse_sequence(tokens)]
        while tokens.kind == "either":
            tokens.advance()
            options.append(self._parse_sequence(tokens))
        if len(options) == 1:
            return options[0]
        return lambda after: self._state(*((None, option(after)) for option in options))

    def _parse_sequence(self, tokens: _Tokens) -> _Part:
        parts = []
        while tokens.kind in ("atom", "edge", "open"):
            parts.append(self._parse_repetition(tokens))
        if tokens.kind == "repeat":
            raise ValueError(f"nothing to repeat before {tokens.text!r}")

        def build(after: int) -> int:
            for part in reversed(parts):
                after = part(after)
            return after

        return build

    def _parse_repetition(self, tokens: _Tokens) -> _Part:
        edge = tokens.kind == "edge"
        part = self._parse_single(tokens)
        if tokens.kind != "repeat":
            return part
        if edge:
            raise ValueError(f"nothing to repeat before {tokens.text!r}")
        least, most = _parse_counts(tokens.text)
        tokens.advance()
        if tokens.kind == "repeat":
            raise ValueError("a repetition of a repetition")

        def build(after: int) -> int:
            if most is None:
                loop = self._state((None, after))
                self._states[loop].append((None, part(loop)))
                after = loop
            for _ in range((most or least) - least):
                after = self._state((None, after), (None, part(after)))
            for _ in range(least):
                after = self._state((None, part(after)))
            return after

        return build

    def _parse_single(self, tokens: _Tokens) -> _Part:
        kind, text = tokens.kind, tokens.text
        tokens.advance()
        if kind == "open":
            tokens.nesting += 1
            if tokens.nesting > _MAX_NESTING:
                raise ValueError(f"groups in more than {_MAX_NESTING} groups")
            inner = self._parse_alternatives(tokens)
            tokens.nesting -= 1
            if tokens.kind != "close":
                raise ValueError("an unmatched '('")
            tokens.advance()
            return inner
        test: _Test = text if kind == "edge" else _parse_letter(text)
        return lambda after: self._state((test, after))


class _Tokens:
    """The tokens of a pattern, one at a time; `kind` is None at the end."""

    kind: str | None
    text: str

    def __init__(self, pattern: str) -> None:
        self.nesting = 0
        self._rest = self._read(pattern)
        self.advance()

    def advance(self) -> None:
        self.kind, self.text = next(self._rest, (None, ""))

    @staticmethod
    def _read(pattern: str) -> Iterator[tuple[str | None, str]]:
        place = 0
        while place < len(pattern):
            found = _TOKEN.match(pattern, place)
            if found is None or pattern.startswith("(?", place) != (found["open"] == "(?:"):
                raise ValueError(f"{pattern[place : place + 10]!r} is not supported here")
            place = found.end()
            kind = "repeat" if found["repeat"] else found.lastgroup
            yield kind, found["repeat"] or found[0]


def _parse_letter(atom: str) -> Callable[[str], object]:
    """Return a test for one letter of an atom: a letter, a class or a dot mean the same as in Python."""
    try:
        return re.compile(atom).fullmatch
    except re.error as error:
        raise ValueError(f"{atom!r}: {error}") from None


def _parse_counts(repeat: str) -> tuple[int, int | None]:
    if repeat in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[repeat]
    least, comma, most = repeat[1:-1].partition(",")
    low = int(least or 0)
    high = int(most) if most else (None if comma else low)
    if not (least or most) or (high is not None and high < low):
        raise ValueError(f"{repeat!r} is not a number of repetitions")
    return low, high
