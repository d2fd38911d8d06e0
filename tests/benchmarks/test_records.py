"""A stored result says how to measure it again, and nothing about the machine's directories."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.records import RESULTS, command, record, stored


def test_the_command_leaves_places_out(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["speed.py", "--params", "1B", "--cache", "/some/where", "--data=/else", "--json", "x.json", "--quick"]
    monkeypatch.setattr("sys.argv", arguments)
    assert command().endswith(" --params 1B --quick")


def test_a_record_has_its_origin(tmp_path: Path) -> None:
    record(tmp_path / "new" / "one.json", {"accuracy": 0.5}, range(3))
    found = json.loads((tmp_path / "new" / "one.json").read_text())
    assert found["results"] == {"accuracy": 0.5}
    assert found["seeds"] == [0, 1, 2]
    assert set(found) == {"command", "date", "machine", "seeds", "results"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one.json"]


def test_no_path_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record(None, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_stored_result_is_traceable(path: Path) -> None:
    found = stored(path.stem)
    assert found
    assert found["command"].startswith("python -m benchmarks.")
    assert found["results"]
    assert found["date"]
    assert "cores" in found["machine"]
    assert not re.search(r"[\s\"]/\w", path.read_text()), "an absolute path"
