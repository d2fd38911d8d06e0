"""What a sweep or the autopilot has measured, in a file of JSON lines, so that it can go on after an interruption."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from merganser.engine.disk import Disk
from merganser.engine.lock import Lock
from merganser.errors import InputError, MerganserError, reading
from merganser.strict_json import parse_json

J = TypeVar("J", bound="LineJournal")


class LineJournal(ABC):
    """Records in the order they were made, by one process at a time; use as a context manager.

    A last line cut off by a crash is forgotten. A file that holds anything else is refused, never changed.
    """

    #: What messages call a record, all of them, and the work that makes them.
    record: ClassVar[str]
    records: ClassVar[str]
    work: ClassVar[str]

    def __init__(self, path: Path | None, scored_by: str, disk: Disk | None = None) -> None:
        self.path = path
        self.scored_by = scored_by
        self._disk = disk or Disk()
        self._lock: Lock | None = None

    def __enter__(self: J) -> J:
        if self.path is not None:
            if not self.path.absolute().parent.is_dir():
                raise InputError(f"{self.path}: no directory {self.path.parent}")
            with self._writing(self.path):
                self._lock = Lock(self.path, self._disk)
                try:
                    self._read(self.path)
                except BaseException:
                    self._lock.release()
                    raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    @abstractmethod
    def accept(self, record: Mapping[str, Any]) -> None:
        """Remember a record of the file; KeyError, TypeError or ValueError if it is none."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record, on disk before it is used."""
        if self.path is None:
            return
        with self._writing(self.path):
            self._disk.before("open", self.path)
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                line = json.dumps({**record, "scored_by": self.scored_by}, default=str)
                self._disk.append(handle, f"{line}\n".encode(), self.path)
            finally:
                os.close(handle)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MerganserError(
                f"{path}: could not be written: {error}; the same {self.work} again goes on"
            ) from error

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        with reading(path):
            content = path.read_bytes()
            content.decode("utf-8", errors="strict" if content.endswith(b"\n") else "ignore")
        intact = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:intact].splitlines(), 1):
            self._parse(line, path, number)
        torn = content[intact:]
        if torn and not intact and not torn.startswith(b'{"label"'[: len(torn)]):
            raise InputError(f"{path}: not the {self.records} of a {self.work}; use another file")
        if torn:
            self._disk.before("truncate", path)
            os.truncate(path, intact)

    def _parse(self, line: bytes, path: Path, number: int) -> None:
        try:
            record = parse_json(line)
            scored_by = str(record["scored_by"])
            if scored_by == self.scored_by:
                self.accept(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(f"{path}, line {number}: not {self.record} of a {self.work}; use another file") from None
        if scored_by != self.scored_by:
            raise InputError(f"{path}: holds {self.describe_others(scored_by)}; use another file")

    def describe_others(self, scored_by: str) -> str:
        """Return what messages call records that belong to something else."""
        return f"{self.records} by {scored_by!r}, not {self.scored_by!r}"


class ScoreJournal(LineJournal):
    """The scores of a sweep."""

    record, records, work = "a score", "scores", "sweep"

    def __init__(self, path: Path | None, scored_by: str, disk: Disk | None = None) -> None:
        super().__init__(path, scored_by, disk)
        self.scores: dict[str, float] = {}

    def accept(self, record: Mapping[str, Any]) -> None:
        self.scores[str(record["key"])] = float("nan") if record["score"] is None else float(record["score"])

    def add(self, key: str, values: Mapping[str, Any], label: str, budget: int, score: float) -> None:
        """Note a score."""
        self.scores[key] = score
        kept = None if score != score else score
        self.append({"label": label, "values": dict(values), "budget": budget, "score": kept, "key": key})
