"""Record which stored tensors are read, in the readers of files, so that views need not know about it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from merganser.checkpoints.base import Checkpoint

#: A reader and the name of a tensor it stores.
StoredRead = tuple["Checkpoint", str]


class _Noting(threading.local):
    into: dict[StoredRead, None] | None = None


_noting = _Noting()


def note_read(checkpoint: Checkpoint, name: str) -> None:
    """Record that a stored tensor is read, if this thread collects reads."""
    if _noting.into is not None:
        _noting.into[checkpoint, name] = None


def file_of(checkpoint: Checkpoint) -> str:
    """Return the file that a reader reads from, as an absolute path, or its label if it has none."""
    return next(map(os.path.abspath, checkpoint.files()), checkpoint.label)


@contextmanager
def noting_reads(into: dict[StoredRead, None]) -> Iterator[None]:
    """Collect the stored tensors that this thread reads inside the block, in the order of their first read."""
    before, _noting.into = _noting.into, into
    try:
        yield
    finally:
        _noting.into = before
