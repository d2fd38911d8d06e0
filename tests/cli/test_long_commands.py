"""Every command that can take long shows the one progress component, with the time left."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
import typer

from merganser.cli import COMMANDS
from merganser.cli.progress import ProgressReporter

#: Commands that end at once; servers and what watches; an upload, with bars of its own; a show that tells each step.
QUICK = {
    "plan",
    "bench-machine",
    "methods",
    "schema",
    "lineage",
    "push",
    "serve",
    "studio",
    "report",
    "library remove",
    "library list",
    "evolve best",
    "evolve export",
    "evolve init",
    "evolve watch",
    "demo",
}


def commands():
    """Every command by its words, with its function."""
    found = {}
    for name, place in COMMANDS.items():
        module, _, function = place.partition(":")
        loaded = import_module(module)
        app = getattr(loaded, function or "command", None) or loaded.app
        if isinstance(app, typer.Typer):
            for each in app.registered_commands:
                found[f"{name} {each.name or each.callback.__name__}"] = each.callback
        else:
            found[name] = app
    return found


def sources(function):
    """The source of a function and of the private functions of its module that it calls."""
    module = inspect.getmodule(function)
    seen, waiting = {}, [function]
    while waiting:
        text = inspect.getsource(waiting.pop())
        for name, other in vars(module).items():
            if (
                inspect.isfunction(other)
                and inspect.getmodule(other) is module
                and name not in seen
                and f"{name}(" in text
            ):
                seen[name] = other
                waiting.append(other)
        seen[text] = None
    return "\n".join(text for text, other in seen.items() if other is None)


FOUND = commands()


def test_every_quick_command_is_one():
    assert set(FOUND) >= QUICK


@pytest.mark.parametrize("name", sorted(set(FOUND) - QUICK))
def test_a_long_command_shows_progress(name):
    text = sources(FOUND[name])
    shown = ("ProgressReporter(", "writing(", "@writes_view")
    assert any(each in text for each in shown), f"{name}: shows no progress; or is it quick?"


def test_steps_are_counted_and_never_exceed_their_total(capsys):
    with ProgressReporter("testing", "steps", as_json=True) as reporter:
        for name in "abc":
            reporter.step(name, 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split('"done": ')[1][:14] for line in lines] == [
        '0, "total": 2,',
        '1, "total": 2,',
        '2, "total": 3,',
        '3, "total": 3,',
    ]


def test_a_log_says_how_much_time_is_left(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("merganser.cli.progress.time.monotonic", lambda: now[0])
    with ProgressReporter("testing", "steps") as reporter:
        for name in "abcd":
            reporter.step(name, 8)
            now[0] += 11.0
    assert "25%  2 of 8 steps  1:06 left" in capsys.readouterr().err


def test_a_library_reports_every_tensor_it_compresses(tmp_path, monkeypatch):
    import torch

    import merganser as mg
    from merganser.cli.library import build

    base = {"a.weight": torch.randn(8, 6), "b.weight": torch.randn(6, 6)}
    mg.save(base, tmp_path / "base")
    for name in ("one", "two"):
        mg.save({key: value + torch.randn_like(value) for key, value in base.items()}, tmp_path / name)
    told = []
    monkeypatch.setattr(
        ProgressReporter, "__call__", lambda self, done, total, name="": told.append((done, total, name))
    )
    build(tmp_path / "library", [f"{n}={tmp_path / n}" for n in ("one", "two")], str(tmp_path / "base"))
    assert told[-2:] == [(5, 6, "compressing two: b.weight"), (6, 6, "")]
    assert [done for done, _, _ in told] == list(range(len(told)))
