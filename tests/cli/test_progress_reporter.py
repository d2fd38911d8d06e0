"""One component shows the progress of every long command: a bar on a terminal, lines in a log, JSON for machines."""

from __future__ import annotations

import io
import json
import re

import pytest

from merganser.cli import progress
from merganser.cli.progress import ProgressReporter
from merganser.evaluate.search import rung_sizes, successive_halving


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("unit", "expected"), [("bytes", "512 bytes"), ("trials", "512/1024 trials")])
def test_a_bar_on_a_terminal(unit: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with ProgressReporter("evolving", unit) as reporter:
        reporter(256, 1024, "layers.0")
        reporter.line("trial [3] done")
        reporter(512, 1024, "layers.1")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "evolving" in shown
    assert expected in shown.replace("0.5 KiB", "512 bytes").replace("0.5/1.0 KiB", "512 bytes")
    assert "trial [3] done" in shown


def test_lines_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with ProgressReporter("comparing", "matrices") as reporter:
        reporter(1, 4, "a")
        reporter(2, 4, "b")
    first, second = capsys.readouterr().err.splitlines()
    assert first == " 25%  1 of 4 matrices"
    assert re.fullmatch(r" 50%  2 of 4 matrices  .+ left", second)


def test_no_speed_before_it_is_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with ProgressReporter("merging") as reporter:
        reporter(256, 1024, "w")
    assert capsys.readouterr().err == " 25%  256 B of 1.0 KiB\n"


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter("merging", as_json=True) as reporter:
        reporter(1, 2, "w")
    event = json.loads(capsys.readouterr().out)
    assert {key: event[key] for key in ("event", "done", "total", "name")} == {
        "event": "progress", "done": 1, "total": 2, "name": "w"
    }  # fmt: skip


@pytest.mark.parametrize(("count", "rungs", "keep"), [(1, 3, 0.5), (7, 3, 0.5), (20, 4, 0.3)])
def test_rungs_are_as_many_as_are_scored(count: int, rungs: int, keep: float) -> None:
    asked: list[int] = []
    budgets = list(range(1, rungs + 1))
    successive_halving(list(range(count)), lambda c, b: asked.append(b) or float(c), budgets=budgets, keep=keep)
    assert [asked.count(budget) for budget in budgets] == rung_sizes(count, rungs, keep)
