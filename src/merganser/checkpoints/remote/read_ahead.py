"""A cache of ranges of remote files: fetched ahead over several connections, dropped after use."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache

from merganser.checkpoints.remote.files import PARALLEL, RemoteFile

#: Size of a request; larger ranges are fetched in parallel.
CHUNK = 1 << 23
#: Bytes held ahead of use. A single larger range is held anyway.
ROOM = 1 << 29
_Key = tuple[int, int, int]


class _Range:
    """A range that is loaded or being fetched."""

    def __init__(self, file: RemoteFile, start: int, stop: int, pool: ThreadPoolExecutor) -> None:
        self.content = bytearray(stop - start)
        self.used = False
        self._file = file
        self._parts = [pool.submit(self._fetch, start, at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)]
        self._checked: Future[None] | None = None
        self._pool = pool
        self._lock = threading.Lock()

    def _fetch(self, origin: int, start: int, stop: int) -> None:
        self.content[start - origin : stop - origin] = self._file.read(start, stop)

    def wait(self) -> bytearray:
        """Return the bytes once they are loaded; raise the error of a failed fetch."""
        wait(self._parts)
        for part in self._parts:
            part.result()
        with self._lock:
            if self._checked is None:
                self._checked = self._pool.submit(self._file.check)
        self._checked.result()
        return self.content


class ReadAhead:
    """The cached ranges of a process."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="merganser-remote")
        self._ranges: OrderedDict[_Key, _Range] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def prefetch(self, file: RemoteFile, start: int, stop: int) -> None:
        """Start to fetch a range, if there is room beside the unused ones."""
        with self._lock:
            if (id(file), start, stop) not in self._ranges and self._make_room(stop - start):
                self._begin(file, start, stop)

    def read(self, file: RemoteFile, start: int, stop: int) -> bytearray:
        """Return a range, which must not be modified."""
        key = (id(file), start, stop)
        with self._lock:
            if key not in self._ranges:
                self._make_room(stop - start)
                self._begin(file, start, stop)
            found = self._ranges[key]
            found.used = True
            self._ranges.move_to_end(key)
        try:
            return found.wait()
        except BaseException:
            with self._lock:
                if self._ranges.get(key) is found:
                    self._drop(key)
            raise

    def _begin(self, file: RemoteFile, start: int, stop: int) -> None:
        self._ranges[id(file), start, stop] = _Range(file, start, stop, self._pool)
        self._held += stop - start

    def _make_room(self, size: int) -> bool:
        """Drop used ranges, the least recently used first; return whether there is room."""
        for key in [key for key, each in self._ranges.items() if each.used]:
            if self._held + size <= ROOM:
                break
            self._drop(key)
        return self._held + size <= ROOM

    def _drop(self, key: _Key) -> None:
        del self._ranges[key]
        self._held -= key[2] - key[1]


@lru_cache(maxsize=1)
def _of_process(process: int) -> ReadAhead:
    return ReadAhead()


def read_ahead() -> ReadAhead:
    """Return the ranges of this process."""
    return _of_process(os.getpid())
