"""What is known to be on disk: one checksummed line per fact, appended only after the data itself is synced."""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from pathlib import Path
from typing import Any

from merganser.engine.disk import Disk
from merganser.errors import InputError
from merganser.strict_json import parse_json


class Journal:
    """An append-only file. A torn last line, from a crash while it was written, is cut off when it is opened."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        disk.before("open", path)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._handle)
            raise InputError(f"{path.parent}: another merge is writing there") from None
        self.records, intact = _parse(path.read_bytes())
        os.ftruncate(self._handle, intact)

    def append(self, record: dict[str, Any]) -> None:
        body = json.dumps(record, sort_keys=True).encode()
        self._disk.append(self._handle, b"%08x %s\n" % (zlib.crc32(body), body), self.path)
        self.records.append(record)

    def close(self) -> None:
        os.close(self._handle)


def _parse(content: bytes) -> tuple[list[dict[str, Any]], int]:
    records: list[dict[str, Any]] = []
    intact = 0
    for line in content.splitlines(keepends=True):
        checksum, _, body = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body):
            break
        records.append(parse_json(body))
        intact += len(line)
    return records, intact
