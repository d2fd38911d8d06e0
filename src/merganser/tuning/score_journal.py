"""Journals of measurements of sweeps and the autopilot, as JSON lines, so that they can be resumed."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from merganser.engine.disk import Disk
from merganser.engine.lock import Lock
from merganser.errors import InputError, MerganserError, reading
from merganser.strict_json import parse_json

J = TypeVar("J", bound="LineJournal")


class LineJournal(ABC):
    """Records in order, written by one process at a time; a context manager.

    An incomplete last line, left by a crash, is dropped. Any other file is refused, never changed.
    """

    #: The words for a record, for all of them, and for the work, in messages.
    record: ClassVar[str]
    records: ClassVar[str]
    work: ClassVar[str]

    def __init__(self, path: Path | None, scored_by: str) -> None:
        self.path = path
        self.scored_by = scored_by
        self._disk = Disk()
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
        """Add a record of the file; raise KeyError, TypeError or ValueError if it is invalid."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record to disk before it is used."""
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
                f"{path}: could not be written: {error}; run the same {self.work} again to continue"
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
            raise InputError(f"{path}: contains {self.describe_others(scored_by)}; use another file")

    def describe_others(self, scored_by: str) -> str:
        """Return the words for records that belong to something else."""
        return f"{self.records} by {scored_by!r}, not {self.scored_by!r}"


class ScoreJournal(LineJournal):
    """The scores of a sweep."""

    record, records, work = "a score", "scores", "sweep"

    def __init__(self, path: Path | None, scored_by: str) -> None:
        super().__init__(path, scored_by)
        self.scores: dict[str, float] = {}

    def accept(self, record: Mapping[str, Any]) -> None:
        self.scores[str(record["key"])] = float("nan") if record["score"] is None else float(record["score"])

    def add(
        self,
        key: str,
        values: Mapping[str, Any],
        label: str,
        budget: int,
        score: float,
        answers: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Record a score, and if they are known, for each task the scores of its questions: reports show intervals."""
        self.scores[key] = score
        kept = None if score != score else score
        record = {"label": label, "values": dict(values), "budget": budget, "score": kept, "key": key}
        if answers is not None:
            record["answers"] = [[round(value, 4) for value in each] for each in answers]
        self.append(record)
