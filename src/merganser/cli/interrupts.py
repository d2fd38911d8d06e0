"""Ctrl-C: every command reports what it leaves on disk and how to continue."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from merganser.cli.renamed import rewrite
from merganser.errors import MerganserError

#: What commands without a message of their own leave behind, by their first word or words.
_LEFT = {
    "library build": "finished experts stay in the library; run the same command to continue",
    "serve": "the server has stopped",
    "evolve watch": "the study is unchanged",
}
_WRITING = ("library", "evolve", "sweep", "merge")


class Interrupted(MerganserError):
    """The user interrupted the command."""

    exit_code: ClassVar[int] = 130


@contextmanager
def explain_interrupt(left: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C into an error whose message `left` computes at that moment."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {left()}") from None


def explain_resume(place: Path) -> str:
    """Return what a resumable command leaves at a path, with the command that continues it."""
    if not place.exists():
        return "nothing was written"
    return f"{place} keeps what is finished; continue with: {command('--resume')}"


def command(*options: str) -> str:
    """Return the running command with additional options, quoted for the shell."""
    given = rewrite(sys.argv[1:])
    return shlex.join(["merganser", *given, *(option for option in options if option not in given)])


def explain_left_behind() -> str:
    """Return what the running command leaves behind if it has no message of its own."""
    words = [word for word in rewrite(sys.argv[1:]) if not word.startswith("-")]
    known = _LEFT.get(" ".join(words[:2])) or _LEFT.get(" ".join(words[:1]))
    return known or ("the work is not finished" if words[:1] and words[0] in _WRITING else "nothing was written")
