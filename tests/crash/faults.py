"""Disks that fail at their n-th operation: by an error, by the end of the process, or after half a write."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

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


def end() -> None:
    """End the process as kill -9 does: nothing is flushed, closed or removed."""
    os._exit(KILLED)


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; 0 if it returned, 1 if it raised, `KILLED` if it was ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)
