"""`merganser demo` with narrower networks, and what it may replace."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from merganser.cli import build, demo
from merganser.errors import InputError, MissingExtraError
from merganser.report import demonstration

pytest.importorskip("sklearn")


def call(*arguments: object) -> str:
    result = CliRunner().invoke(build(), ["demo", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing trained, a line of results."""

    def demonstrate(digits: object, out: Path, tell: demo.Tell) -> dict[str, object]:
        tell("training")
        demonstration.write(out, ["up"], 100, [], [["one", 0.5]])
        return {"merging": [], "alignment": [["one", 0.5]]}

    monkeypatch.setattr(demo, "_demonstrate", demonstrate)


def test_the_demo_shows_every_recipe_and_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merganser.digits.WIDTH", 16)
    out = tmp_path / "demo"
    lines = call(out).splitlines()
    assert lines.count("Three networks trained independently") == 1
    firsts = [line.split()[0] for line in lines if line]
    for method in demo.RECIPES:
        assert method in firsts
        assert (out / "merged" / method / "model.safetensors").is_file()
    assert sum(line.startswith("trained with seed") for line in lines) == 3
    assert lines[-1].endswith(f"the report is {out}/report.html")
    assert "average in the universe" in (out / "report.html").read_text(encoding="utf-8")
    assert demonstration.is_demo(out)


def test_an_earlier_demo_is_replaced_only_if_asked(tmp_path: Path, quick: None) -> None:
    out = tmp_path / "demo"
    call(out)
    (out / "mine.txt").touch()
    with pytest.raises(InputError, match="exists already"):
        call(out)
    assert (out / "mine.txt").exists()
    call(out, "--overwrite")
    assert [path.name for path in out.iterdir()] == ["results.json"]


def test_results_as_json_stand_alone(tmp_path: Path, quick: None) -> None:
    found = json.loads(call(tmp_path / "demo", "--json"))
    assert found == {"event": "done", "path": str(tmp_path / "demo"), "merging": [], "alignment": [["one", 0.5]]}


@pytest.mark.parametrize(
    ("place", "message"), [("mine", "is not the output of a demo"), (".", "not a name"), ("..", "not a")]
)
def test_nothing_else_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None, place: str, message: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        call(place, "--overwrite")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.tex"]


def test_without_its_data_the_demo_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    out = tmp_path / "demo"
    call(out)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match="demo"):
        call(out, "--overwrite")
    assert demonstration.is_demo(out)
