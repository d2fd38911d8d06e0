"""Checksums of written outputs, and a check that every entry was written exactly once.

The checksum of an output is the checksum of the checksums of its blocks (`engine.blocks.cut`), in order. Blocks are
hashed as they are written, while they are in the processor's cache. If an output has a digest for the lock file, the
digest is its checksum, and blocks are only counted.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping

import xxhash

from merganser.engine.blocks import BLOCK, Piece, cut
from merganser.engine.plan import Output
from merganser.errors import MerganserError


class Tally:
    """The blocks of outputs in flight; blocks may arrive from any thread in any order."""

    def __init__(self, hashing: bool = True) -> None:
        self._hashing = hashing
        self._blocks: dict[str, dict[int, tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, output: Output, piece: Piece, data: memoryview) -> None:
        """Record the bytes of a piece.

        Raises:
            MerganserError: If their number does not match the piece, or it was written before.
        """
        itemsize = output.spec.element.itemsize
        if len(data) != piece.numel * itemsize:
            raise _fault(output, f"{len(data)} bytes were made for {piece.numel} entries of {itemsize}")
        whole = piece.numel == output.spec.numel
        found = {}
        for block in cut(output.spec.shape, BLOCK) if whole else [piece]:
            start = (block.offset - piece.offset) * itemsize
            made = data[start : start + block.numel * itemsize]
            found[block.offset] = block.numel, _hash(made) if self._hashing else 0
        with self._lock:
            known = self._blocks.setdefault(output.name, {})
            if twice := known.keys() & found.keys():
                raise _fault(output, f"the entries from {min(twice)} on were written twice")
            known.update(found)

    def close(self, output: Output) -> str:
        """Return the checksum of a finished output if its blocks were hashed, and forget them.

        Raises:
            MerganserError: If some of its entries were not written, or some twice.
        """
        with self._lock:
            blocks = self._blocks.pop(output.name, {})
        return combine(output, blocks)


def combine(output: Output, blocks: Mapping[int, tuple[int, int]]) -> str:
    """Return the checksum of an output from its blocks by offset, which must cover it exactly."""
    reached = 0
    digest = xxhash.xxh3_64()
    for offset in sorted(blocks):
        entries, checksum = blocks[offset]
        if offset != reached:
            raise _fault(output, f"entry {min(offset, reached)} was written {'twice' if offset < reached else 'never'}")
        digest.update(struct.pack("<QQQ", offset, entries, checksum))
        reached += entries
    if reached != output.spec.numel:
        raise _fault(output, f"{reached} of {output.spec.numel} entries were written")
    return digest.hexdigest()


def checksum(output: Output, read: Callable[[int, int], bytes]) -> str:
    """Return the checksum of a stored output; `read(start, stop)` returns its bytes, fewer at their end."""
    itemsize = output.spec.element.itemsize
    blocks = {}
    for block in cut(output.spec.shape, BLOCK):
        if block.numel:
            data = read(block.offset * itemsize, (block.offset + block.numel) * itemsize)
            blocks[block.offset] = block.numel, _hash(memoryview(data))
    return combine(output, blocks)


def _hash(data: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


def _fault(output: Output, what: str) -> MerganserError:
    return MerganserError(f"{output.name!r}: {what}; this is a bug in merganser or in a method; please report it")
