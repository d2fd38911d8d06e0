"""Ctrl-C: every command says what it leaves behind, and how to go on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from typer.core import TyperGroup

from merganser.errors import MerganserError

#: What is left behind by commands that do not say it themselves, by their first word or words.
_LEFT = {
    "experts build": "experts that are finished stay in the library; the same command goes on",
    "serve": "the server is stopped",
    "evolve watch": "the study is not touched",
}
_WRITING = ("experts", "evolve", "sweep", "merge")


class Interrupted(MerganserError):
    """The user has stopped the work."""

    exit_code: ClassVar[int] = 130


class Commands(TyperGroup):
    """A group whose commands end with a message when they are interrupted; typer alone would say nothing."""

    def invoke(self, ctx: Any) -> Any:
        with explain_interrupt(_left):
            return super().invoke(ctx)


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
    given = sys.argv[1:]
    return shlex.join(["merganser", *given, *(option for option in options if option not in given)])


def _left() -> str:
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    known = _LEFT.get(" ".join(words[:2])) or _LEFT.get(" ".join(words[:1]))
    return known or ("the work is not finished" if words[:1] and words[0] in _WRITING else "nothing was written")
