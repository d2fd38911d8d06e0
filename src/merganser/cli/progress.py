"""Progress as its reader wants it: a bar on a terminal, plain lines in a log, JSON lines for machines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from merganser.cli.output import emit, say
from merganser.units import show_size, show_time

LOG_SECONDS = 10.0


class ProgressReporter:
    """Shows bytes done, the rate of this run, and the time left; use as a context manager and call with each event."""

    def __init__(self, as_json: bool = False) -> None:
        self._json = as_json
        self._bar: Any = None
        self._task: Any = None
        self._began = time.monotonic()
        self._first: int | None = None
        self._spoke = self._began

    def __enter__(self) -> ProgressReporter:
        if not self._json and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            self._bar = Progress(
                TextColumn("merging"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[name]}", table_column=None),
                console=Console(stderr=True),
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, name: str) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = done
        rate = (done - self._first) / max(1e-9, now - self._began)
        left = (total - done) / rate if rate > 0 else 0.0
        if self._json:
            emit({"event": "progress", "done": done, "total": total, "name": name, "bytes_per_second": round(rate)})
        elif self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("merge", total=total, completed=done, name="")
            self._bar.update(self._task, completed=done, name=name[-40:])
        elif now - self._spoke >= LOG_SECONDS:
            self._spoke = now
            say(
                f"{done / max(1, total):4.0%}  {show_size(done)} of {show_size(total)}  {show_size(rate)}/s  "
                f"{show_time(left)} left",
                sys.stderr,
            )
