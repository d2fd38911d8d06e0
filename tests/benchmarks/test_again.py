"""Stored commands can be run again: they name programs that exist and options that these take."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest

from benchmarks import again
from benchmarks.records import PEERS, RESULTS, stored


def test_placeholders_are_replaced_or_left_out() -> None:
    command = "python -m benchmarks.a --only x y && python -m benchmarks.b --mergekit BIN --quick"
    found = list(again.commands(command, Path("a.json"), {"--mergekit": Path("/peer/bin")}))
    assert found[0][1:] == ["-m", "benchmarks.a", "--only", "x", "y", "--json", "a.json"]
    assert found[1][1:] == ["-m", "benchmarks.b", "--mergekit", "/peer/bin", "--quick", "--json", "a.json"]
    assert list(again.commands(command, Path("a.json"), {}))[1][1:4] == ["-m", "benchmarks.b", "--quick"]


def _sources(module: str) -> Iterator[Path]:
    """Yield the files of a program and of the modules beside it that declare options for it."""
    found = util.find_spec(module)
    assert found
    assert found.origin
    yield Path(found.origin)
    for node in ast.walk(ast.parse(Path(found.origin).read_bytes())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks."):
            yield from _sources(node.module or "")


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_every_stored_command_names_a_program_and_its_options(name: str) -> None:
    for command in again.commands(stored(name)["command"], Path("x.json"), dict.fromkeys(PEERS, Path("peer"))):
        source = "".join(path.read_text() for path in {*_sources(command[2])})
        for option in (word for word in command[3:] if word.startswith("--")):
            assert f'"{option}"' in source, f"{command[2]} takes no {option}"


def test_what_is_not_stored_is_refused_at_once() -> None:
    command = [sys.executable, "-m", "benchmarks.again", "nonsense"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(again.__file__).parents[1])
    assert run.returncode == 2
    assert "nothing is stored for nonsense" in run.stderr
