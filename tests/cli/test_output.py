"""What commands print: one way to speak, one way to print data."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import merganser.cli
from merganser.cli import build
from merganser.cli.output import wrap_lines
from merganser.report import demonstration

COMMANDS = sorted(Path(merganser.cli.__file__).parent.glob("*.py"))


def test_a_number_that_is_none_is_null(tmp_path: Path) -> None:
    demonstration.write(tmp_path, ["up"], 100, [["base", math.nan, math.inf, 0.5]], [])
    result = CliRunner().invoke(build(), ["report", str(tmp_path), "--json"])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert result.exception is None
    [found] = json.loads(result.stdout, parse_constant=refuse)["found"]
    assert found["merging"] == [["base", None, None, 0.5]]


@pytest.mark.parametrize("file", COMMANDS, ids=lambda file: file.stem)
def test_commands_speak_through_one_module(file: Path) -> None:
    """It flushes, survives readers that have gone away, and prints JSON that every reader takes."""
    if file.stem != "output":
        assert not re.search(r"(?<!\.)\bprint\(|typer\.echo", file.read_text(encoding="utf-8"))


def test_long_lines_of_an_error_are_broken_below_their_beginning(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = wrap_lines(
        "error: r.yml: 1 problem\n  models[1]: ./gone: no such file or directory (looked beside the recipe)"
    )
    assert text.split("\n") == [
        "error: r.yml: 1 problem",
        "  models[1]: ./gone: no such file or",
        "    directory (looked beside the recipe)",
    ]
    monkeypatch.delenv("COLUMNS")
    assert wrap_lines("x " * 200) == "x " * 200, "pipes get whole lines"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_letters_that_the_terminal_lacks_are_escaped(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "merganser", "methods", "ties"]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert b"\\u03b8 = " in done.stdout


def test_closed_streams_swallow_what_is_printed(tmp_path: Path) -> None:
    """As in a service without a terminal; what is opened next must not become standard output."""
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / "recipe.yml").write_text("{method: passthrough, models: [a.safetensors]}")
    command = f"{sys.executable} -m merganser merge recipe.yml out <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, cwd=tmp_path, check=False).returncode == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    failed = f"{sys.executable} -m merganser merge nothing.yml other >&- 2>&-"
    assert subprocess.run(failed, shell=True, cwd=tmp_path, check=False).returncode == 2


def test_closed_streams_are_as_good_as_empty_ones(tmp_path: Path) -> None:
    command = f"{sys.executable} -m merganser plan - <&-"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: standard input: the recipe is empty\n")


def test_processes_of_a_command_get_its_closed_streams(tmp_path: Path) -> None:
    """Or a file of weights that a worker opens would be its standard error."""
    opening = "import os; os.mkdir(str(os.open('weights', os.O_RDWR | os.O_CREAT)))"
    script = (
        "import subprocess, sys; from merganser.cli.output import prepare_streams; prepare_streams(); "
        "subprocess.run([sys.executable, '-c', sys.argv[1]], close_fds=False)"
    )
    command = f'{sys.executable} -c "{script}" "{opening}" <&- >&- 2>&-'
    assert subprocess.run(command, shell=True, cwd=tmp_path, check=False).returncode == 0
    assert not {"0", "1", "2"} & {path.name for path in tmp_path.iterdir()}
