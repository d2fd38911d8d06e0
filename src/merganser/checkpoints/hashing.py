"""Hashes of the whole content of a checkpoint, for cached results.

A fingerprint uses headers and samples. That is enough to tell models apart, but not to detect that a few values of one
have changed.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import xxhash

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.digests import digest_file, digest_tensor


def content_hash(checkpoint: Checkpoint) -> str:
    """Return a hash of the names, specs and every byte of the weights of a checkpoint.

    A file is read once per process, unless it changes.

    Args:
        checkpoint: Any checkpoint: its files are hashed, or its tensors if it is in memory.

    Returns:
        The hash, in hexadecimal. Copies have the same hash.

    Example:
        >>> content_hash(merganser.open("model"))  # doctest: +SKIP
        '5cd9…'
    """
    digest = xxhash.xxh3_128(checkpoint.fingerprint().encode())
    files = checkpoint.files()
    for file in files:
        state = file.stat()
        found = _file_hash(file.resolve(), (state.st_size, state.st_mtime_ns, state.st_ino))
        digest.update(bytes.fromhex(found))
    for name in () if files else checkpoint.names():
        digest.update(f"{name}\n{digest_tensor(checkpoint.read(name), 'xxh3_128')}".encode())
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def _file_hash(path: Path, stamp: tuple[int, int, int]) -> str:
    """Return the hash of a file; `stamp` invalidates the cache when it changes."""
    return digest_file(path, "xxh3_128")
