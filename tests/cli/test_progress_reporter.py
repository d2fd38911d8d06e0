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


@pytest.mark.parametrize("columns", [50, 60, 80, 120])
@pytest.mark.parametrize(("unit", "expected"), [("bytes", "of 1.0 KiB"), ("trials", "512 of 1,024 trials")])
def test_a_bar_on_a_terminal(unit: str, expected: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with ProgressReporter("evolving", unit) as reporter:
        reporter(256, 1024, "layers.0")
        reporter.line("trial [3] done")
        reporter.line(" ".join(["trial [4]", *["words"] * 30]))
        reporter(512, 1024, "model.layers.11.post_attention_layernorm.weight.and.a.name.without.an.end[1]")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "evolving" in shown
    assert expected in shown
    assert " left" in shown
    assert "trial [3] done" in shown
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", shown)]
    assert max(map(len, lines)) <= columns
    bars = [line for line in re.split(r"[\r\n]+", shown) if line.startswith("evolving")]
    assert max(map(len, bars)) <= columns - len("^C"), "the terminal's echo of Ctrl-C fits on the line of the bar"
    assert all(line.startswith(("evolving", "trial", "  words")) for line in lines if line), "the bar is one line"


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


def test_steps_that_are_fewer_than_foreseen_are_all_done_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter("reading", "experts", as_json=True) as reporter:
        for name in ("math", "code"):
            reporter.step(name, 3)
    *begun, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(each["done"], each["total"], each["name"]) for each in begun] == [(0, 3, "math"), (1, 3, "code")]
    assert (last["done"], last["total"]) == (2, 2)
    failing = ProgressReporter("reading", "experts", as_json=True)
    failing.step("math", 2)
    failing.__exit__(KeyError, KeyError(), None)
    assert len(capsys.readouterr().out.splitlines()) == 1, "what failed is not done"


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


def test_the_time_left_is_that_of_what_is_still_to_do(monkeypatch, capsys) -> None:
    now = iter([0.0, 60.0, 70.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with ProgressReporter("merging") as reporter:
        reporter(50 << 20, 100 << 20, "the first tensor, after a minute")
        reporter(60 << 20, 100 << 20, "the next")
    assert capsys.readouterr().err.splitlines()[-1] == " 60%  60.0 MiB of 100.0 MiB  1.0 MiB/s  0:40 left"
