"""Printing to standard output, including closed pipes and full disks."""

from __future__ import annotations

import io
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from merganser.errors import MerganserError
from merganser.plain import plain
from merganser.report.tables import terminal_width


def prepare_streams() -> None:
    """Make the standard streams usable: closed ones are empty, and open ones escape what their encoding lacks."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # or a file of weights would become standard error
        os.set_inheritable(descriptor, True)  # also in processes started from here
    os.close(descriptor)
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.writable():
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def flush_or_raise(stream: TextIO) -> Iterator[None]:
    """Flush what is printed inside. Ignores a reader that has closed the pipe; raises if the disk is full."""
    try:
        yield
        stream.flush()
    except OSError as error:
        # The rest of the buffer would fail again at exit, where it cannot be caught.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise MerganserError(f"cannot write to {stream.name}: {error.strerror}") from None


def say(text: str, stream: TextIO | None = None) -> None:
    """Print text for people on standard output, or on another stream, in lines that fit the terminal."""
    write(f"{wrap_lines(text)}\n", stream)


def write(text: str, stream: TextIO | None = None) -> None:
    """Print text exactly as it is, for programs to read."""
    stream = stream or sys.stdout
    with flush_or_raise(stream):
        print(text, file=stream, end="")


def say_written(path: Path, as_json: bool) -> None:
    """Print the last line of a command that has written something."""
    if as_json:
        emit({"event": "done", "path": str(path)})
    else:
        say(f"wrote {path}")


def wrap(text: str, indent: str = "") -> str:
    """Break a paragraph at the terminal's width; lines after the first begin with `indent`."""
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": indent}
    return textwrap.fill(text, max(40, terminal_width()), **options)


def wrap_lines(text: str) -> str:
    """Break every line that is longer than the terminal is wide; its rest is indented further than its beginning."""
    width = max(40, terminal_width())
    lines = text.split("\n")
    return "\n".join(
        wrap(line, "  " + line[: len(line) - len(line.lstrip())]) if len(line) > width else line for line in lines
    )


def emit(content: Any) -> None:
    """Print data as one line of JSON on standard output; NaN and infinity, which JSON lacks, become null."""
    write(f"{json.dumps(plain(content), allow_nan=False)}\n")
