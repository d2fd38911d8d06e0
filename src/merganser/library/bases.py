"""The base of a library: its location, its identity and its main dtype."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from merganser.checkpoints.base import Checkpoint, is_integer, row_blocks
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import CheckpointError
from merganser.lazy import torch

#: Entries that are read and hashed at once.
_BLOCK = 1 << 22


def place_of(base: Reference) -> str | None:
    """Return where to find the base again: an absolute path or a hub id; None if it is only in memory."""
    if not isinstance(base, (str, os.PathLike)):
        return None
    path = Path(os.path.expanduser(base))
    return str(path.resolve()) if path.exists() else os.fspath(base)


def open_base(library: Path, place: Reference, fingerprints: Collection[str], moved: Reference | None) -> Checkpoint:
    """Open the base at its `place`, or where it was `moved` to, and check that the library was built on it."""
    try:
        opened = open_checkpoint(moved if moved is not None else place)
    except CheckpointError as error:
        raise CheckpointError(f"{library}: the base cannot be opened: {error}; give its location with `base`") from None
    if opened.fingerprint() not in fingerprints:
        raise CheckpointError(f"{library}: {opened.label} is not the base this library was built on")
    return opened


def weights_checksum(checkpoint: Checkpoint) -> str:
    """Return the sha256 of every weight with its name, dtype and shape, independent of the split into files."""
    digest = hashlib.sha256()
    for name in sorted({*checkpoint.names(), *checkpoint.aliases()}):
        spec = checkpoint.spec(name)
        digest.update(f"{name} {spec.dtype} {list(spec.shape)}\n".encode())
        for rows in row_blocks(spec, entries=_BLOCK):
            block = checkpoint.read(name, rows).to(spec.dtype)
            digest.update(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def main_dtype(base: Checkpoint) -> torch.dtype:
    """Return the floating dtype of most bytes of the base; float32 if there is none."""
    sizes: dict[torch.dtype, int] = {}
    for spec in map(base.spec, base.names()):
        if not is_integer(spec.dtype):
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
