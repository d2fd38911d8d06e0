"""A stored result says how to measure it again, and nothing about the machine's directories."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.records import RESULTS, command, record, stored


def test_the_command_leaves_places_out(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["speed.py", "--params", "1B", "--cache", "/some/where", "--data=/else", "--json", "x.json", "--quick"]
    monkeypatch.setattr("sys.argv", [*arguments, "--mergekit=/peers/bin", "--py-irt", "/peers/python"])
    assert command().endswith(" --params 1B --quick --mergekit BIN --py-irt PYTHON")


def test_results_added_to_others_keep_their_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.json"
    commands = []
    for option, added in (
        ("--all", False),
        ("--only=a", True),
        ("--only=a", True),
        ("--only=b", True),
        ("--all", False),
    ):
        monkeypatch.setattr("sys.argv", ["speed.py", option])
        record(path, {}, [0], added)
        commands.append([part[part.index("--") :] for part in json.loads(path.read_text())["command"].split(" && ")])
    parts = ["--all"], ["--all", "--only a"], ["--all", "--only a"], ["--all", "--only a", "--only b"], ["--all"]
    assert commands == list(parts)


def test_results_added_on_another_machine_name_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.json"
    for machine, added in (("A, 2 cores", False), ("B, 2 cores", True), ("A, 2 cores", True)):
        monkeypatch.setattr("benchmarks.records.describe", lambda machine=machine: machine)
        record(path, {}, [0], added)
    assert json.loads(path.read_text())["machine"] == "B, 2 cores; A, 2 cores"


def test_a_record_has_its_origin(tmp_path: Path) -> None:
    record(tmp_path / "new" / "one.json", {"accuracy": 0.5}, range(3))
    found = json.loads((tmp_path / "new" / "one.json").read_text())
    assert found["results"] == {"accuracy": 0.5}
    assert found["seeds"] == [0, 1, 2]
    assert set(found) == {"command", "date", "machine", "seeds", "results"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one.json"]


def test_no_path_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record(None, {}, [0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_stored_result_is_traceable(path: Path) -> None:
    found = stored(path.stem)
    assert found["command"].startswith("python -m benchmarks.")
    assert found["results"]
    assert found["date"]
    assert "cores" in found["machine"]
    assert not re.search(r"[\s\"]/\w", path.read_text()), "an absolute path"
