"""Ctrl-C: every command says what it leaves behind, and how to go on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from merganser.cli.renamed import rewrite
from merganser.errors import MerganserError

#: What is left behind by commands that do not say it themselves, by their first word or words.
_LEFT = {
    "library build": "experts that are finished stay in the library; the same command goes on",
    "serve": "the server is stopped",
    "evolve watch": "the study is not touched",
}
_WRITING = ("library", "evolve", "sweep", "merge")


class Interrupted(MerganserError):
    """The user has stopped the work."""

    exit_code: ClassVar[int] = 130


@contextmanager
def explain_interrupt(left: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C into an error that says what `left` finds when it comes."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {left()}") from None


def left_in(place: Path) -> str:
    """What a command that can be resumed leaves at a place, and the command that goes on."""
    if not place.exists():
        return "nothing was written"
    return f"{place} keeps what is finished; go on with: {command('--resume')}"


def command(*options: str) -> str:
    """The command that is running, with more options, for the shell."""
    given = rewrite(sys.argv[1:])
    return shlex.join(["merganser", *given, *(option for option in options if option not in given)])


def left_behind() -> str:
    """What a command leaves behind that does not say it itself."""
    words = [word for word in rewrite(sys.argv[1:]) if not word.startswith("-")]
    known = _LEFT.get(" ".join(words[:2])) or _LEFT.get(" ".join(words[:1]))
    return known or ("the work is not finished" if words[:1] and words[0] in _WRITING else "nothing was written")
