"""What a program costs: seconds, processor seconds and anonymous memory of it and its workers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    seconds: float
    cpu_seconds: float
    peak_anonymous: int


class Peak(threading.Thread):
    """The most anonymous memory of this process while the context lasts, beyond that at its start, as `bytes`."""

    def __enter__(self) -> Peak:
        with contextlib.suppress(AttributeError, OSError):  # what was freed before must not be there to be used again
            ctypes.CDLL(None).malloc_trim(0)
        self._most = self._before = anonymous(os.getpid())
        self._over = threading.Event()
        self.start()
        return self

    def run(self) -> None:
        while not self._over.wait(0.05):
            self._most = max(self._most, anonymous(os.getpid()))

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        self.bytes = self._most - self._before


def measure(command: list[str], out: Path, environment: dict[str, str] | None = None, keep: bool = False) -> Run:
    """Run a program that writes `out`, sync what it wrote, and watch its anonymous memory."""
    if not keep:
        shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=os.environ | (environment or {}), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peak = 0
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        pause = 0.02
        while not over.wait(pause):
            workers = children(process.pid)
            peak = max(peak, shared(process.pid, *workers) if workers else anonymous(process.pid))
            pause = 2.0 if workers else 0.02  # sorting out shared pages costs the programs time

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    over.set()
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    for file in out.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
    return Run(time.perf_counter() - began, usage.ru_utime + usage.ru_stime, peak)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def anonymous(pid: int) -> int:
    """Bytes of anonymous pages of one process."""
    return field(Path(f"/proc/{pid}/status"), "RssAnon:")


def shared(*pids: int) -> int:
    """Bytes of anonymous pages of processes that share some of them."""
    return sum(field(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Anon:") for pid in pids)


def field(path: Path, name: str) -> int:
    """A size in one of the kernel's tables, in bytes; 0 for a process that is gone."""
    try:
        return next(int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith(name))
    except (OSError, StopIteration):
        return 0


def median(runs: list[Run]) -> Run:
    return Run(
        statistics.median(r.seconds for r in runs),
        statistics.median(r.cpu_seconds for r in runs),
        max(r.peak_anonymous for r in runs),
    )
