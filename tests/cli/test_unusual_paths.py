"""Paths that the system refuses, and names that begin with a tilde."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import merganser as mg
from merganser.cli import main
from merganser.errors import InputError
from merganser.library.lora import extract_lora
from support.locked_models import make_models

LONG = "y" * 300


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_models(tmp_path)
    (tmp_path / "recipe.yml").write_text("method: linear\nmodels: [math, code]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [["merge", "recipe.yml", LONG], ["merge", "recipe.yml", "z" * 250], ["plan", LONG],
                                   ["inspect", LONG], ["verify", LONG], ["lineage", LONG]])  # fmt: skip
def test_a_path_that_is_too_long_is_refused(models: Path, monkeypatch, capsys, words: list[str]) -> None:
    before = sorted(models.rglob("*"))
    monkeypatch.setattr("sys.argv", ["merganser", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "unexpected" not in (told := capsys.readouterr().err)
    assert "too long" in told or "no such" in told
    assert sorted(models.rglob("*")) == before


def test_a_model_may_be_called_as_nobody_is(models: Path) -> None:
    shutil.copytree("math", "~nobody-of-this-name")
    merged = mg.merge(["~nobody-of-this-name", "math"])
    assert torch.equal(merged["norm.weight"], mg.open("math")["norm.weight"])
    mg.run({"method": "linear", "models": ["./~nobody-of-this-name", "code"]}, "out")


def test_a_tilde_is_the_home_directory_of_outputs_too(models: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(models / "home"))
    assert mg.run("recipe.yml", "~/out") == models / "home/out"
    assert (models / "home/out/model.safetensors").is_file()
    with pytest.raises(InputError, match=r"'~' is not expanded here; write .*home/adapter"):
        extract_lora("math", "code", "~/adapter", rank=1)
    assert not (models / "~").exists()
