"""The base of a library: where to find it again, whether it is the one, what most of it is stored in."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import torch

from merganser.checkpoints.base import Checkpoint, is_integer
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import CheckpointError


def place_of(base: Reference) -> str | None:
    """Where to find the base again: a path that holds from everywhere, or a hub id; None if it is only in memory."""
    if not isinstance(base, (str, os.PathLike)):
        return None
    path = Path(base).expanduser()
    return str(path.resolve()) if path.exists() else os.fspath(base)


def open_base(library: Path, place: Reference, fingerprints: Collection[str], moved: Reference | None) -> Checkpoint:
    """The base at its `place`, or where it was `moved` to, if it is the one the library was built on."""
    try:
        opened = open_checkpoint(moved if moved is not None else place)
    except CheckpointError as error:
        raise CheckpointError(f"{library}: the base cannot be opened: {error}; name its place with `base`") from None
    if opened.fingerprint() not in fingerprints:
        raise CheckpointError(f"{library}: {opened.label} is not the base this library was built on")
    return opened


def main_dtype(base: Checkpoint) -> torch.dtype:
    """The floating dtype that most bytes of the base are in; float32 if there is none."""
    sizes: dict[torch.dtype, int] = {}
    for spec in map(base.spec, base.names()):
        if not is_integer(spec.dtype):
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
