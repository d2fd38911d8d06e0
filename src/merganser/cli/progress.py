"""Progress reports: a bar on a terminal, plain lines in a log, JSON lines for programs."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from merganser.cli.output import emit, say, wrap_lines
from merganser.excerpts import shorten
from merganser.units import show_size, show_time

if TYPE_CHECKING:
    from merganser.engine.execute import Progress

LOG_SECONDS = 10.0
BYTES = "bytes"
#: The width of the bar, and that of terminals on which the rate has a place beside it.
BAR, WIDE = 12, 80
#: Columns left free at the end of a line, where terminals echo Ctrl-C; on the next line, it would leave a second bar.
ECHO = 3


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
            self._bar = _bar(self._doing)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._steps and kind is None:
            self(self._steps, self._steps)
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, name: str = "", left: float | None = None) -> None:
        """Report an event; `left` are the seconds left, if more is known than the rate."""
        now = time.monotonic()
        if self._first is None:  # what was done before, also by an earlier run, does not count
            self._first, self._began = done, now
        rate = (done - self._first) / max(1e-9, now - self._began)
        if self._json:
            speed = {"bytes_per_second": round(rate)} if self._unit == BYTES else {}
            emit({"event": "progress", "done": done, "total": total, "name": name, **speed})
        elif self._bar is not None:
            width = self._bar.console.width
            amounts = self._amounts(done, total, rate, left, brief=width < WIDE)
            room = width - ECHO - BAR - len(self._doing + amounts) - 3
            shown = {"amounts": amounts, "name": shorten(name, max(1, room), "end")}
            if self._task is None:
                self._task = self._bar.add_task(self._doing, total=total, completed=done, **shown)
            self._bar.update(self._task, completed=done, total=total, **shown)
        elif now - self._spoke >= LOG_SECONDS:
            self._spoke = now
            say(f"{done / max(1, total):4.0%}  {self._amounts(done, total, rate, left)}", sys.stderr)

    def follow(self, progress: Progress) -> None:
        """Report the progress of a merge."""
        self(progress.done, progress.total, progress.name)

    def step(self, name: str, total: int) -> None:
        """Report that a step begins; those before it are done, and it is at the end. There may be fewer in the end."""
        self(self._steps, max(total, self._steps + 1), name)
        self._steps += 1

    def line(self, text: str) -> None:
        """Print a line on standard error without breaking the bar; in a log, it is news enough for a while."""
        self._spoke = time.monotonic()
        if self._bar is not None:
            self._bar.console.print(wrap_lines(text), markup=False, highlight=False, soft_wrap=True)
        else:
            say(text, sys.stderr)

    def _amounts(self, done: int, total: int, rate: float, left: float | None, brief: bool = False) -> str:
        """Return the amount done, the rate and the time left; in brief without the rate."""
        seconds = (total - done) / rate if left is None and rate > 0 else left
        ahead = "" if seconds is None else f"  {show_time(seconds)} left"
        if self._unit != BYTES:
            return f"{done:,} of {total:,} {self._unit}{ahead}"
        if brief:
            return f"{done / max(1, total):.0%} of {show_size(total)}{ahead}"
        speed = f"  {show_size(rate)}/s" if rate > 0 else ""
        return f"{show_size(done)} of {show_size(total)}{speed}{ahead}"


def _bar(doing: str) -> Any:
    from rich.console import Console, RenderableType
    from rich.constrain import Constrain
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    console = Console(stderr=True)

    class Bar(Progress):
        def get_renderable(self) -> RenderableType:
            return Constrain(super().get_renderable(), console.width - ECHO)

    name = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return Bar(
        TextColumn(doing),
        BarColumn(bar_width=BAR),
        TextColumn("{task.fields[amounts]}", markup=False, table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[name]}", markup=False, table_column=name),
        console=console,
        expand=True,
    )
