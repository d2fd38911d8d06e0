"""Digests of inputs and results, computed while their bytes are in the processor's cache.

A digest needs its bytes in order. If several threads share a tensor they arrive out of order; then there is no digest,
and the bytes must be read again for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from merganser.checkpoints.digests import DIGESTS
from merganser.checkpoints.reads import StoredRead
from merganser.checkpoints.safetensors_file import SafetensorsFile
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine.blocks import Piece


class RunningDigest:
    """The digest of a number of bytes that arrive in order.

    Example:
        >>> digest = RunningDigest("sha256", 2)
        >>> digest.add(0, b"a")
        >>> digest.add(1, b"b")
        >>> digest.finish()[:8]
        'fb8e20fc'
    """

    def __init__(self, algorithm: str, total: int) -> None:
        self._digest: Any = DIGESTS[algorithm]()
        self._total = total
        self._reached: int | None = 0

    def add(self, start: int, data: Any) -> None:
        """Add the bytes from `start` on; bytes out of order invalidate the digest."""
        if self._reached != start:
            self._reached = None
            return
        self._digest.update(data)
        self._reached = None if self._reached is None else start + len(data)

    def finish(self) -> str | None:
        """Return the digest, or None if bytes are missing or came out of order."""
        return str(self._digest.hexdigest()) if self._reached == self._total else None


class SourceDigests:
    """Digests of the stored tensors that an output is computed from, updated block by block.

    Covers only tensors that are read directly from their file, not computed views.
    """

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._running: dict[StoredRead, tuple[RunningDigest, memoryview, int]] = {}

    def follow(self, reads: Iterable[StoredRead], rows: Sequence[StoredEntries | None], origin: int) -> None:
        """Start the reads whose bytes are those of rows that begin at the flat index `origin`."""
        places = {each.address - origin * each.element.itemsize for each in rows if each is not None}
        for read in reads:
            checkpoint, name = read
            if read not in self._running and isinstance(checkpoint, SafetensorsFile):
                if checkpoint.address(name) not in places:
                    continue
                data = checkpoint.read_bytes(name)
                size = checkpoint.spec(name).element.itemsize
                self._running[read] = (RunningDigest(self._algorithm, len(data)), data, size)

    def add(self, block: Piece) -> None:
        """Add a block that was just used."""
        for running, data, size in self._running.values():
            start = block.offset * size
            running.add(start, data[start : start + block.numel * size])

    def finish(self) -> Mapping[StoredRead, str]:
        """Return the digests that are complete."""
        found = {read: running.finish() for read, (running, _, _) in self._running.items()}
        return {read: digest for read, digest in found.items() if digest is not None}
