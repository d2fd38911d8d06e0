"""Disks that fail at their n-th operation: by an error, by the end of the process, or after half a write."""

from __future__ import annotations

import errno
import os
import sqlite3
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from merganser.engine.disk import Disk

#: What the process that is ended returns.
KILLED = 77


class Counting(Disk):
    """Notes every operation; `act` is called ahead of the one at which things go wrong."""

    def __init__(self, at: int = -1, act: Callable[[], None] = lambda: None) -> None:
        self.at = at
        self.act = act
        self.operations: list[str] = []

    def _sync(self, handle: int, how: Callable[[int], None] = os.fsync) -> None:
        """Nothing: what the system has in memory outlives the process, and a test need not wait for it."""

    def before(self, operation: str, path: Path) -> None:
        self.operations.append(operation)
        if len(self.operations) - 1 == self.at:
            self.act()


class Failing(Counting):
    """One operation fails; with `dead` all after it too, as on a disk that is gone."""

    def __init__(self, at: int, dead: bool = False, code: int = errno.EIO) -> None:
        super().__init__(at)
        self.dead = dead
        self.code = code

    def before(self, operation: str, path: Path) -> None:
        super().before(operation, path)
        here = len(self.operations) - 1
        if here == self.at or (self.dead and here > self.at >= 0):
            raise OSError(self.code, "injected", str(path))


class Halving(Counting):
    """Every write takes half of what it is given; from the n-th operation on the process ends in the middle of it."""

    def _pwrite(self, handle: int, data: memoryview, offset: int) -> int:
        written = super()._pwrite(handle, data[: len(data) // 2 + 1], offset)
        self._end_after_a_write()
        return written

    def _write(self, handle: int, data: memoryview) -> int:
        written = super()._write(handle, data[: len(data) // 2 + 1])
        self._end_after_a_write()
        return written

    def _end_after_a_write(self) -> None:
        if 0 <= self.at < len(self.operations):
            end()


def faulty_connections(disk: Disk) -> type[sqlite3.Connection]:
    """SQLite connections whose writing statements and commits are operations of the disk."""

    class Faulty(sqlite3.Connection):
        def _before(self, operation: str) -> None:
            try:
                disk.before(operation, Path(operation))
            except OSError as error:
                raise sqlite3.OperationalError(f"disk I/O error: {error}") from error

        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            if not sql.startswith("SELECT"):
                self._before(sql.split()[0].lower())
            return super().execute(sql, *parameters)

        def executemany(self, sql: str, parameters: Any) -> sqlite3.Cursor:
            self._before("many")
            return super().executemany(sql, parameters)

        def executescript(self, script: str) -> sqlite3.Cursor:
            self._before("script")
            return super().executescript(script)

        def __exit__(self, *error: Any) -> Any:
            try:
                self._before("commit")
            except sqlite3.Error:
                self.rollback()
                raise
            return super().__exit__(*error)

    return Faulty


def end() -> None:
    """End the process as kill -9 does: nothing is flushed, closed or removed."""
    os._exit(KILLED)


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; 0 if it returned, 1 if it raised, `KILLED` if it was ended."""
    return run_in_child(work)[0]


def run_in_child(work: Callable[[], object]) -> tuple[int, str]:
    """Run `work` in a forked process: what `in_child` returns, and the error that it raised, with its place."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with open(reader, "rb") as pipe:
            said = pipe.read().decode()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said
    try:
        os.close(reader)
        work()
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        os.write(writer, f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}".encode())
        os._exit(1)
    os._exit(0)
