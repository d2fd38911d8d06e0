"""Lines for whoever reads them, and what to do when nobody can."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from merganser.errors import MerganserError


@contextmanager
def delivered(stream: TextIO) -> Iterator[None]:
    """Flush what is printed inside. A reader that has gone away is no reason to stop; a full disk is one."""
    try:
        yield
        stream.flush()
    except OSError as error:
        # What is left in the buffer would fail again at exit, where nobody can catch it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise MerganserError(f"cannot write to {stream.name}: {error.strerror}") from None


def say(line: str, stream: TextIO | None = None) -> None:
    """A line on standard output, or on another stream."""
    stream = stream or sys.stdout
    with delivered(stream):
        print(line, file=stream)
