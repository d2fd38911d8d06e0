"""The scores of a sweep in a file of JSON lines, so that it can go on after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from merganser.engine.disk import Disk
from merganser.engine.lock import Lock
from merganser.errors import InputError, MerganserError, reading
from merganser.strict_json import parse_json


class ScoreJournal:
    """Scores in the order they were had, by one process at a time; use as a context manager.

    A last line cut off by a crash is forgotten. A file that holds anything else is refused, never changed.
    """

    def __init__(self, path: Path | None, scored_by: str, disk: Disk | None = None) -> None:
        self.path = path
        self.scored_by = scored_by
        self.scores: dict[str, float] = {}
        self._disk = disk or Disk()
        self._lock: Lock | None = None

    def __enter__(self) -> ScoreJournal:
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

    def add(self, key: str, values: Mapping[str, Any], label: str, budget: int, score: float) -> None:
        """Note a score, on disk before it is used."""
        self.scores[key] = score
        if self.path is None:
            return
        record = {
            "label": label,
            "values": dict(values),
            "budget": budget,
            "score": None if score != score else score,
            "scored_by": self.scored_by,
            "key": key,
        }
        with self._writing(self.path):
            self._disk.before("open", self.path)
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                self._disk.append(handle, (json.dumps(record, default=str) + "\n").encode(), self.path)
            finally:
                os.close(handle)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MerganserError(f"{path}: could not be written: {error}; the same sweep again goes on") from error

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        with reading(path):
            content = path.read_bytes()
            content.decode("utf-8", errors="strict" if content.endswith(b"\n") else "ignore")
        intact = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:intact].splitlines(), 1):
            key, score, scored_by = _parse(line, f"{path}, line {number}")
            if scored_by != self.scored_by:
                raise InputError(f"{path}: holds scores by {scored_by!r}, not {self.scored_by!r}; use another file")
            self.scores[key] = score
        torn = content[intact:]
        if torn and not intact and not torn.startswith(b'{"label"'[: len(torn)]):
            raise InputError(f"{path}: not the scores of a sweep; use another file")
        if torn:
            self._disk.before("truncate", path)
            os.truncate(path, intact)


def _parse(line: bytes, where: str) -> tuple[str, float, str]:
    try:
        record = parse_json(line)
        score = float("nan") if record["score"] is None else float(record["score"])
        return str(record["key"]), score, str(record["scored_by"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{where}: not a score of a sweep; use another file") from None
