"""A journal of what is on disk: one checksummed line per fact, appended only after the data is synced."""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from merganser.engine.disk import Disk
from merganser.strict_json import parse_json


class Journal:
    """An append-only file. An incomplete last line, left by a crash, is cut off when the file is opened."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        disk.before("open", path)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.records, self._end = _parse(path.read_bytes())
        os.ftruncate(self._handle, self._end)

    def append(self, record: dict[str, Any]) -> None:
        body = json.dumps(record, sort_keys=True).encode()
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        try:
            self._disk.append(self._handle, line, self.path)
        except OSError:
            with suppress(OSError):  # half a line would corrupt the next one
                os.ftruncate(self._handle, self._end)
            raise
        self._end += len(line)
        self.records.append(record)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def read_records(path: Path) -> list[dict[str, Any]] | None:
    """Return the records of a journal, without opening it for writing; None if the file is not a journal.

    An empty file, or one line without an end, is a journal whose first line was never finished.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    records, _ = _parse(content)
    return None if not records and b"\n" in content else records


def _parse(content: bytes) -> tuple[list[dict[str, Any]], int]:
    records: list[dict[str, Any]] = []
    intact = 0
    for line in content.splitlines(keepends=True):
        checksum, _, body = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body):
            break
        record = parse_json(body)
        if not isinstance(record, dict):
            break
        records.append(record)
        intact += len(line)
    return records, intact
