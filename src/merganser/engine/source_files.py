"""The files a merge reads, as they were at its start: a change meanwhile would mix two versions."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from merganser.errors import CheckpointError

#: Absolute path, size, time of writing and inode; a fingerprint only samples the weights.
FileState = tuple[str, int, int, int]


class SourceFiles:
    """The states of files at construction."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self.paths = tuple(dict.fromkeys(files))
        self.states = _states(self.paths)

    def changed_since(self, states: Iterable[Iterable[str | int]]) -> str | None:
        """Return a path that had another state before, or none at all."""
        before = {tuple(state) for state in states}
        return next((str(state[0]) for state in sorted(before ^ self.states, key=str)), None)

    def check(self) -> None:
        """Refuse files that were written, replaced or removed since construction."""
        try:
            changed = SourceFiles(self.paths).changed_since(self.states)
        except OSError as error:
            changed = str(error.filename)
        if changed is not None:
            raise CheckpointError(
                f"{changed} was written, replaced or removed during the merge: the result would mix two versions "
                "and was discarded; merge again once the file no longer changes"
            )


def _states(paths: Iterable[Path]) -> frozenset[FileState]:
    found = ((path, path.stat()) for path in paths)
    return frozenset((os.path.abspath(path), state.st_size, state.st_mtime_ns, state.st_ino) for path, state in found)
