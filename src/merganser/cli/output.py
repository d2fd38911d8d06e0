"""Lines for whoever reads them, and what to do when nobody can."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from merganser.errors import MerganserError


def to_json(content: Any) -> str:
    """JSON on one line. NaN and infinity, which JSON does not know, become null."""
    return json.dumps(_finite(content), allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


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
