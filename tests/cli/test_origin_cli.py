"""`verify`, `lineage` and `push` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from merganser.cli import main
from support.locked_models import make_models


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    make_models(tmp_path)
    (tmp_path / "recipe.yml").write_text("method: linear\nmodels: [math, code]\n")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["merganser", *words])
        with pytest.raises(SystemExit) as end:
            main()
        told = capsys.readouterr()
        return int(end.value.code or 0), told.out, told.err

    return run


def test_verify(call) -> None:
    assert call("merge", "recipe.yml", "out", "--digest", "xxh3_128")[0] == 0
    code, out, _ = call("verify", "out", "--rebuild")
    assert code == 0
    assert "verified 4 tensors" in out
    assert "rebuilt  4 tensors" in out
    Path("math").rename("maths")
    code, out, _ = call("verify", "out", "--rebuild", "--sample", "2", "--moved", "math=maths", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events if event["event"] != "progress"] == ["verified", "rebuilt"]
    assert all(event["problems"] == [] for event in events if "problems" in event)
    Path("out/config.json").write_text("[]")
    code, out, err = call("verify", "out")
    assert code == 1
    assert "wrong    config.json has changed" in out
    assert "error: out differs from its lock file: 1 problem, listed above" in err
    assert "config.json" not in err, "what is wrong is said once"


def test_what_verify_refuses(call) -> None:
    code, _, err = call("verify", "math")
    assert (code, "has no merganser.lock.json" in err) == (2, True)
    code, _, err = call("verify", "math", "--sample", "3")
    assert (code, "need --rebuild" in err) == (2, True)
    code, _, err = call("verify", "math", "--rebuild", "--moved", "math")
    assert (code, "expected MODEL=PATH" in err) == (2, True)


def test_lineage(call) -> None:
    call("merge", "recipe.yml", "out")
    code, out, _ = call("lineage", "out", "--html", "page.html")
    assert code == 0
    assert "└── code (model, cc-by-sa-4.0)" in out
    assert "licence  apache-2.0: math" in out
    assert "<svg" in Path("page.html").read_text()
    told = json.loads(call("lineage", "out", "--json")[1])
    assert told["tree"]["made_of"][0]["label"] == "math"
    assert told["licences"] == {"apache-2.0": ["math"], "cc-by-sa-4.0": ["code"]}


def test_push(call) -> None:
    call("merge", "recipe.yml", "out")
    code, out, _ = call("push", "out", "org/name", "--dry-run")
    assert code == 0
    assert out.splitlines()[-1].startswith("would upload ")
    assert "model.safetensors" in out
    assert json.loads(call("push", "out", "org/name", "--dry-run", "--json")[1])["repository"] == "org/name"
