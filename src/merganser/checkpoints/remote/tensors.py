"""A remote safetensors file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from merganser.checkpoints.base import Rows
from merganser.checkpoints.digests import digest_bytes
from merganser.checkpoints.remote.files import FIRST, RemoteFile
from merganser.checkpoints.remote.read_ahead import read_ahead
from merganser.checkpoints.safetensors_file import MAX_HEADER, Extent, StoredTensors, parse_header
from merganser.checkpoints.stored_entries import Bytes
from merganser.errors import CheckpointError
from merganser.lazy import np


class RemoteSafetensors(StoredTensors):
    """A remote file; a tensor is fetched whole when its first row is read, and kept for a while."""

    def __init__(self, file: RemoteFile, directory: Path | None = None) -> None:
        self.file = file
        self.label = file.url
        self.directory = directory
        super().__init__(*_read_header(file))

    def _read(self, entry: Extent) -> Bytes:
        return np.frombuffer(read_ahead().read(self.file, entry.start, entry.stop), np.uint8)

    def peek(self, name: str, first: int, count: int) -> bytes:
        entry = self._find(name)
        start = entry.start + first * entry.spec.element.itemsize
        return self.file.read(start, start + count * entry.spec.element.itemsize)

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        entry = self._find(name)
        if entry.start < entry.stop:
            read_ahead().prefetch(self.file, entry.start, entry.stop)

    def digest(self, name: str, algorithm: str) -> str:
        entry = self._find(name)
        data = read_ahead().read(self.file, entry.start, entry.stop) if entry.start < entry.stop else b""
        return digest_bytes(data, algorithm)

    def overhead(self, name: str, entries: int) -> int:
        return self.spec(name).nbytes

    def fingerprint(self) -> str:
        """Return a hash of header, size and the server's name for this version of the file."""
        digest = hashlib.sha256(f"{self.file.size} {self.file.version}\n".encode())
        for name, entry in self.entries.items():
            digest.update(f"{name} {entry.spec} {entry.start}\n".encode())
        return digest.hexdigest()


def _read_header(file: RemoteFile) -> tuple[Mapping[str, Extent], Mapping[str, str]]:
    """Return entries and metadata, with one request for most files and two for the others."""
    start = file.read(0, min(FIRST, file.size))
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > MAX_HEADER or 8 + length > file.size:
        raise CheckpointError(f"{file.url}: not a safetensors file, or cut short ({file.size} bytes)")
    if 8 + length > len(start):
        start += file.read(len(start), 8 + length)
    return parse_header(start[8 : 8 + length], file.size, file.url)
