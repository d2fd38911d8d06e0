"""The SQLite file of a study: design, artifacts, and every trial with genome, answers, estimates and timings.

One process writes while any number read (write-ahead log). A trial is committed and synced when it ends; a process that
dies loses only its current evaluations.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from merganser.errors import InputError, MerganserError
from merganser.evolve.arrays import Array
from merganser.evolve.costs import Costs, add_costs
from merganser.evolve.domains import Values
from merganser.evolve.schema import StudyRecord
from merganser.strict_json import parse_json

VERSION = 3
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE artifacts (name TEXT PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE trials (
    id INTEGER PRIMARY KEY,
    content TEXT NOT NULL,          -- a Trial as JSON; the other columns are parts of it, for queries
    kind TEXT NOT NULL,
    label TEXT NOT NULL,
    state TEXT NOT NULL,
    generation INTEGER,
    position INTEGER,
    seconds REAL NOT NULL,
    cached_from INTEGER
);
CREATE UNIQUE INDEX place ON trials (generation, position) WHERE kind = 'candidate';
CREATE INDEX by_label ON trials (kind, label);
CREATE TABLE answers (
    trial INTEGER NOT NULL REFERENCES trials (id),
    measure TEXT NOT NULL,
    items BLOB NOT NULL,            -- int64
    content BLOB NOT NULL,          -- float64
    PRIMARY KEY (trial, measure)
);
"""
_TABLES = {
    *(("table", name) for name in ("meta", "artifacts", "trials", "answers")),
    *(("index", name) for name in ("place", "by_label")),
}
#: Parts of a trial that have columns of their own.
_QUERIED = ("kind", "label", "state", "generation", "position", "seconds", "cached_from")
_RESTORE = "restore it from a copy, or start a new study"


@dataclass(frozen=True)
class Answers:
    """Per-item values of one measure; `items` are indices of the task's items."""

    items: np.ndarray[Any, np.dtype[np.int64]]
    values: Array


@dataclass(frozen=True)
class TrialEstimate(StudyRecord):
    """An estimated score, its standard error if known, and for merges the mixture of the endpoints' abilities."""

    value: float
    error: float | None = None
    mixture: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Trial(StudyRecord):
    """One evaluation.

    Attributes:
        kind: candidate (of the search), endpoint (calibration), test (held-out items), full (the whole pool) or
            quantized (an endpoint on held-out items, as quantised as candidates).
        label: The key of the values, or the endpoint's label.
        state: done, failed or infeasible.
        values: The value of every variable.
        objectives: The value of every objective; of other kinds, the mean of every measure.
        stopped: The trial it gained too little over to be asked everything.
        cached_from: The trial with the same values whose answers it shares.
        recalled: How many of its answers are those that it gave in the search.
    """

    kind: Literal["candidate", "endpoint", "test", "full", "quantized"]
    label: str
    state: Literal["done", "failed", "infeasible"]
    generation: int | None = None
    position: int | None = None
    genome: tuple[float, ...] | None = None
    values: Values | None = None
    objectives: Mapping[str, float] = field(default_factory=dict)
    estimates: Mapping[str, TrialEstimate] = field(default_factory=dict)
    violations: tuple[float, ...] = ()
    seconds: float = 0.0
    finished: float = 0.0
    worker: str | None = None
    attempts: int = 1
    cached_from: int | None = None
    stopped: int | None = None
    recalled: int = 0
    error: str | None = None
    id: int | None = None

    @property
    def valid(self) -> bool:
        """Return whether it was evaluated and is inside the constraints."""
        return self.state == "done" and all(v <= 0 for v in self.violations)

    @property
    def may_win(self) -> bool:
        """Return whether it is valid and was asked everything: a trial stopped by a race has an estimate from few
        items.
        """
        return self.valid and self.stopped is None

    @property
    def reason(self) -> str:
        """Return the first line of its error, without the traceback."""
        return next(iter((self.error or "").splitlines()), "")


_TRIAL = TypeAdapter(Trial)
_COSTS = TypeAdapter(dict[str, dict[str, float]])


class Store:
    """A study file open for writing (created if absent) or, with `readonly`, for reading while another process
    writes.
    """

    def __init__(self, path: str | PathLike[str], *, readonly: bool = False) -> None:
        self.path, self._readonly = Path(path), readonly
        if readonly and not self.path.is_file():
            raise InputError(f"{self.path}: no such study")
        mode = "ro" if readonly else "rwc"
        try:
            self._connection = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode={mode}", uri=True, timeout=30)
            self._open(readonly)
        except sqlite3.Error as error:
            raise InputError(f"{self.path}: not a study, or not readable: {error}") from error

    def _open(self, readonly: bool) -> None:
        self._connection.execute("PRAGMA trusted_schema=OFF")
        if not self._describe_tables():
            if readonly:
                raise InputError(f"{self.path}: an empty file, not a study")
            with self._connection:
                self._connection.executescript("BEGIN;" + _SCHEMA + f"PRAGMA user_version={VERSION};")
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version != VERSION:
            raise InputError(
                f"{self.path}: has version {version} of the study format, and this program reads version {VERSION}; "
                "use the program that started it, or start a new study"
            )
        if self._describe_tables() != _TABLES:  # a view in place of a table could run forever
            raise InputError(f"{self.path}: its tables are not those of a study; use another file")
        if not readonly:
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")

    def _describe_tables(self) -> set[tuple[str, str]]:
        """Return types and names of the tables and everything else created in the file."""
        return set(self._connection.execute("SELECT type, name FROM sqlite_master WHERE sql IS NOT NULL"))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Report errors of a damaged file as damage to the file."""
        try:
            yield
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(f"{self.path}: damaged: {where} of a trial: {first['msg']}; {_RESTORE}") from None
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise InputError(f"{self.path}: damaged, or not readable: {error}; {_RESTORE}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Run a transaction; a failure leaves the file unchanged."""
        try:
            with self._connection:
                yield
        except sqlite3.IntegrityError as error:
            raise MerganserError(f"{self.path}: another process is writing to this study") from error
        except sqlite3.Error as error:
            raise MerganserError(
                f"{self.path}: could not be written: {error}; fix this and resume the study"
            ) from error

    def close(self) -> None:
        """Close the file. A writer merges its log into it, so that the study is one file, unless others read it."""
        if not self._readonly:
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA busy_timeout=0")
                self._connection.execute("PRAGMA journal_mode=DELETE")
        self._connection.close()

    def get(self, key: str) -> Any:
        with self._reading():
            row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            return None if row is None else parse_json(row[0])

    def set(self, **entries: Any) -> None:
        """Store values by key in one transaction."""
        rows = [(key, json.dumps(value)) for key, value in entries.items()]
        with self._writing():
            self._connection.executemany("REPLACE INTO meta VALUES (?, ?)", rows)

    def costs(self) -> dict[str, dict[str, float]]:
        """Return what the trials of each kind have cost so far, and the fitting of estimators."""
        found = self.get("costs") or {}
        with self._reading():
            return _COSTS.validate_python(found)

    def artifact(self, name: str) -> bytes | None:
        with self._reading():
            row = self._connection.execute("SELECT content FROM artifacts WHERE name = ?", (name,)).fetchone()
            return None if row is None else bytes(memoryview(row[0]))

    def keep(self, name: str, content: bytes) -> None:
        with self._writing():
            self._connection.execute("REPLACE INTO artifacts VALUES (?, ?)", (name, content))

    def add(self, trial: Trial, answers: Mapping[str, Answers], costs: Costs | None = None) -> Trial:
        """Record a trial, its answers and what it cost in one transaction; returns it with its id."""
        before = self.costs() if costs else {}
        with self._writing():
            row = {name: getattr(trial, name) for name in _QUERIED}
            row["content"] = _TRIAL.dump_json(trial, exclude={"id"}).decode()
            marks = ", ".join(f":{name}" for name in row)
            cursor = self._connection.execute(f"INSERT INTO trials ({', '.join(row)}) VALUES ({marks})", row)
            number = cursor.lastrowid
            self._connection.executemany(
                "INSERT INTO answers VALUES (?, ?, ?, ?)",
                [
                    (number, measure, a.items.astype("<i8").tobytes(), a.values.astype("<f8").tobytes())
                    for measure, a in answers.items()
                ],
            )
            if costs:
                total = {**before, trial.kind: add_costs(before.get(trial.kind, {}), costs)}
                self._connection.execute("REPLACE INTO meta VALUES ('costs', ?)", (json.dumps(total),))
        return replace(trial, id=number)

    def forget(self, kind: str, generation: int = 0) -> None:
        """Delete the trials of a kind from a generation on, and their answers."""
        which = "kind = ? AND coalesce(generation, 0) >= ?"
        with self._writing():
            self._connection.execute(
                f"DELETE FROM answers WHERE trial IN (SELECT id FROM trials WHERE {which})", (kind, generation)
            )
            self._connection.execute(f"DELETE FROM trials WHERE {which}", (kind, generation))

    def trials(self, kind: str | None = None, label: str | None = None) -> list[Trial]:
        """Return trials in the order of the search (by generation and position), others in the order they ended."""
        with self._reading():
            return list(self._select(kind, label))

    def pace(self, kind: str) -> tuple[int, float]:
        """Return the number of trials of a kind inside the constraints, also failed and copied ones, and the seconds
        that they took.
        """
        query = "SELECT count(*), total(seconds) FROM trials WHERE kind = ? AND state != 'infeasible'"
        with self._reading():
            count, seconds = self._connection.execute(query, (kind,)).fetchone()
        return int(count), float(seconds)

    def asked(self, kind: str) -> int:
        """Return how many items the trials of a kind were asked, without copied and recalled answers and failed
        trials.
        """
        answered = "SELECT total(length(items) / 8) FROM answers JOIN trials ON trial = id WHERE kind = ? AND measure "
        recalled = "SELECT total(json_extract(content, '$.recalled')) FROM trials WHERE kind = ? AND state = 'done'"
        with self._reading():
            counts = [
                self._connection.execute(query, (kind,)).fetchone()[0]
                for query in (answered + "NOT LIKE '%.%'", recalled)
            ]
        return int(counts[0] - counts[1])

    def _select(self, kind: str | None, label: str | None) -> Iterator[Trial]:
        query = "SELECT id, content FROM trials WHERE (?1 IS NULL OR kind = ?1) AND (?2 IS NULL OR label = ?2) "
        cursor = self._connection.execute(query + "ORDER BY kind, generation, position, id", (kind, label))
        with closing(cursor):
            for number, content in cursor:
                yield replace(_TRIAL.validate_json(content), id=number)

    def answers(self, trial: Trial) -> dict[str, Answers]:
        query = "SELECT measure, items, content FROM answers WHERE trial = ? ORDER BY measure"
        with self._reading():
            rows = self._connection.execute(query, (trial.id,))
            found = {m: Answers(np.frombuffer(i, "<i8"), np.frombuffer(v, "<f8")) for m, i, v in rows}
            if wrong := [measure for measure, each in found.items() if each.items.shape != each.values.shape]:
                raise ValueError(f"the answers to {wrong[0]!r} are incomplete")
        return found
