"""Pointers that Git LFS leaves in place of files it has not downloaded."""

from __future__ import annotations

from pathlib import Path

from merganser.errors import CheckpointError

_FIRST_BYTES = b"version https://git-lfs"


def refuse_lfs_pointer(path: Path) -> None:
    """Raise if a file is only a pointer of Git LFS.

    Raises:
        CheckpointError: Says how to download the file itself.
    """
    with path.open("rb") as file:
        if file.read(len(_FIRST_BYTES)) == _FIRST_BYTES:
            raise CheckpointError(
                f"{path}: only a Git LFS pointer, not the file itself; run `git lfs pull` there, or download it again"
            )
