"""The files of a checkpoint: laid out first, then written in place in any order."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from merganser.checkpoints.digests import DIGESTS
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine.blocks import Piece
from merganser.engine.changes import Change
from merganser.engine.checksums import Tally, checksum
from merganser.engine.disk import Disk, explain
from merganser.engine.layout import Shard
from merganser.engine.plan import Output
from merganser.engine.running_digests import RunningDigest
from merganser.engine.sinks import Digests, Finished

_CHUNK = 1 << 18


class ShardFiles:
    """The open files of a layout, positional writes into them, and the checksums of what was written."""

    def __init__(
        self, directory: Path, shards: list[Shard], disk: Disk, create: bool = True, digest: str | None = None
    ) -> None:
        self._disk = disk
        self._digest = digest
        self._staging = directory.parent
        self._paths = [directory / shard.file for shard in shards]
        self._handles: list[int] = []
        self._tally = Tally(hashing=digest is None)
        self._running: dict[str, RunningDigest] = {}
        try:
            for path, shard in zip(self._paths, shards, strict=True):
                if create:
                    if path.parent != directory:
                        disk.make_directory(path.parent)
                    self._handles.append(disk.create(path, shard.size))
                    disk.write_at(self._handles[-1], memoryview(shard.header), 0, path)
                else:
                    self._handles.append(os.open(path, os.O_RDWR))
        except OSError:
            self.close()
            raise
        self._places = {
            name: (number, offset) for number, shard in enumerate(shards) for name, offset in shard.offsets.items()
        }

    def write(self, output: Output, piece: Piece, entries: StoredEntries) -> None:
        if not piece.numel:
            return
        number, offset = self._places[output.name]
        data = entries.bytes.data
        self._tally.add(output, piece, data)
        if self._digest:
            running = self._running.get(output.name)
            if running is None:
                running = self._running.setdefault(output.name, RunningDigest(self._digest, output.spec.nbytes))
            running.add(piece.offset * output.spec.element.itemsize, data)
        at = offset + piece.offset * output.spec.element.itemsize
        try:
            self._disk.write_at(self._handles[number], data, at, self._paths[number])
        except OSError as error:
            raise explain(error, self._staging) from error

    def close_output(self, output: Output, change: Change | None, sources: Digests) -> Finished:
        """Return the record of an output whose pieces have all been written here."""
        checksum = self._tally.close(output)
        if self._digest:
            checksum = self._finish_digest(output) or self._read_back(output, self._digest)
        return Finished(checksum, change, sources)

    def _finish_digest(self, output: Output) -> str | None:
        running = self._running.pop(output.name, None)
        return running.finish() if running is not None else None

    def _read_back(self, output: Output, algorithm: str) -> str:
        """Return the digest of the bytes of an output in its file."""
        number, origin = self._places[output.name]
        digest = DIGESTS[algorithm]()
        for start in range(0, output.spec.nbytes, _CHUNK):
            digest.update(os.pread(self._handles[number], min(_CHUNK, output.spec.nbytes - start), origin + start))
        return str(digest.hexdigest())

    def holds(self, output: Output, expected: str) -> bool:
        """Return whether the bytes of an output on disk are as they were written."""
        if self._digest:
            return self._read_back(output, self._digest) == expected
        number, origin = self._places[output.name]

        def read(start: int, stop: int) -> bytes:
            return os.pread(self._handles[number], stop - start, origin + start)

        return checksum(output, read) == expected

    def shard_of(self, name: str) -> int:
        return self._places[name][0]

    def sync(self, numbers: Collection[int]) -> None:
        for number in sorted(numbers):
            self._disk.sync(self._handles[number], self._paths[number])

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.pop())


class WorkerSink:
    """Writes into files that another process has laid out and keeps track of."""

    def __init__(self, files: ShardFiles) -> None:
        self.write = files.write
        self._files = files
        self._finished: dict[str, Finished] = {}

    def done(self) -> Collection[str]:
        return ()

    def finished(self, output: Output, change: Change | None, sources: Digests) -> None:
        self._finished[output.name] = self._files.close_output(output, change, sources)

    def report(self) -> dict[str, Finished]:
        """Return the outputs finished since the last report, by name."""
        finished, self._finished = self._finished, {}
        return finished
