"""Directories of files that were downloaded whole; they are removed when the process ends."""

from __future__ import annotations

import tempfile
from pathlib import Path

_kept: list[tempfile.TemporaryDirectory[str]] = []


def new_directory() -> Path:
    """Return a new directory for downloads."""
    _kept.append(tempfile.TemporaryDirectory(prefix="merganser-", ignore_cleanup_errors=True))
    return Path(_kept[-1].name)


def is_download(path: Path) -> bool:
    """Return whether a path is in such a directory, so that the next process finds the same file elsewhere."""
    return any(path.is_relative_to(directory.name) for directory in _kept)
