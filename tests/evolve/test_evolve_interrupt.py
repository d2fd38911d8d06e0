"""Ctrl-C in `merganser evolve run`: it says what is left, and the command that goes on does."""

from __future__ import annotations

import re
import shlex
import signal

import pytest

from merganser.cli import evolve, main
from merganser.evolve.study import Study

pytest.importorskip("pymoo")


@pytest.fixture(autouse=True)
def listening():
    """Python hears SIGINT, also where a shell that started the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def command(monkeypatch, capsys):
    """`merganser ARGS` in this process: exit code and standard error."""

    def call(*args):
        monkeypatch.setattr("sys.argv", ["merganser", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return int(stopped.value.code or 0), err

    return call


def test_an_interrupted_search_says_what_is_left_and_how_to_go_on(command, run_file, monkeypatch):
    path = run_file()
    heard = evolve._Listener.__call__

    def interrupt(self, event):
        heard(self, event)
        if event.phase == "search" and event.done == 6:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(evolve._Listener, "__call__", interrupt)
        code, err = command("evolve", "run", path)
    said = re.fullmatch(
        r"interrupted: (\S+) keeps what is finished; continue with: merganser (.*)", err.splitlines()[-1]
    )
    assert (code, said[1]) == (130, str(path.with_suffix(".sqlite")))
    assert len(Study.open(said[1], readonly=True).trials()) >= 6
    assert shlex.split(said[2]) == ["evolve", "run", str(path), "--resume"]
    code, err = command(*shlex.split(said[2]))
    assert code == 0, err
    assert Study.open(said[1], readonly=True).ended


def test_an_interruption_before_the_study_is_made(command, run_file, monkeypatch):
    def interrupt(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("merganser.evolve.runs.start", interrupt)
    code, err = command("evolve", "run", run_file())
    assert (code, err.splitlines()[-1]) == (130, "interrupted: nothing was written")
