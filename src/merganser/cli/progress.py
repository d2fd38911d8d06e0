"""Progress reports: a bar on a terminal, plain lines in a log, JSON lines for programs."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from merganser.cli.output import emit, say
from merganser.units import show_size, show_time

if TYPE_CHECKING:
    from merganser.engine.execute import Progress

LOG_SECONDS = 10.0
BYTES = "bytes"


class ProgressReporter:
    """Shows the amount done, the rate of this run and the time left. A context manager to call with each event."""

    def __init__(self, doing: str, unit: str = BYTES, *, as_json: bool = False) -> None:
        self._doing = doing
        self._unit = unit
        self._json = as_json
        self._bar: Any = None
        self._task: Any = None
        self._began = time.monotonic()
        self._first: int | None = None
        self._spoke = self._began
        self._steps = 0

    def __enter__(self) -> ProgressReporter:
        if not self._json and sys.stderr.isatty():
            self._bar = _bar(self._doing, self._unit)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, name: str = "") -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = done
        rate = (done - self._first) / max(1e-9, now - self._began)
        if self._json:
            speed = {"bytes_per_second": round(rate)} if self._unit == BYTES else {}
            emit({"event": "progress", "done": done, "total": total, "name": name, **speed})
        elif self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self._doing, total=total, completed=done, name="")
            self._bar.update(self._task, completed=done, total=total, name=name[-40:])
        elif now - self._spoke >= LOG_SECONDS:
            self._spoke = now
            left = f"  {show_time((total - done) / rate)} left" if rate > 0 else ""
            say(f"{done / max(1, total):4.0%}  {self._amounts(done, total, rate)}{left}", sys.stderr)

    def follow(self, progress: Progress) -> None:
        """Report the progress of a merge."""
        self(progress.done, progress.total, progress.name)

    def step(self, name: str, total: int) -> None:
        """Report that a step begins; those before it are done. There may be fewer than `total` in the end."""
        self(self._steps, max(total, self._steps + 1), name)
        self._steps += 1

    def line(self, text: str) -> None:
        """Print a line on standard error without breaking the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            say(text, sys.stderr)

    def _amounts(self, done: int, total: int, rate: float) -> str:
        if self._unit == BYTES:
            speed = f"  {show_size(rate)}/s" if rate > 0 else ""
            return f"{show_size(done)} of {show_size(total)}{speed}"
        return f"{done} of {total} {self._unit}"


def _bar(doing: str, unit: str) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts = (
        [DownloadColumn(binary_units=True), TransferSpeedColumn()]
        if unit == BYTES
        else [MofNCompleteColumn(), TextColumn(unit)]
    )
    return Progress(
        TextColumn(doing),
        BarColumn(bar_width=20),
        *amounts,
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}", table_column=None),
        console=Console(stderr=True),
    )
