"""`OUT.safetensors`: one file of weights, published as carefully as a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import merganser as mg
from crash.faults import Counting, end, in_child
from crash.merges import merge
from merganser.errors import InputError, MerganserError

MODELS = {"a": {"w": torch.ones(3, 4), "b": torch.arange(4)}, "b": {"w": torch.zeros(3, 4), "b": torch.arange(4)}}


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, object]:
    for name, tensors in MODELS.items():
        mg.save(tensors, tmp_path / name)
    return {"method": "linear", "models": [str(tmp_path / "a"), str(tmp_path / "b")]}


def test_all_weights_are_in_one_file(recipe, tmp_path):
    out = mg.run(recipe, tmp_path / "out.safetensors", shard_size=16)
    assert out.is_file()
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "out.safetensors", "out.safetensors.lock.json"]
    merged = load_file(out)
    assert torch.equal(merged["w"], torch.full((3, 4), 0.5))
    assert torch.equal(merged["b"], torch.arange(4))
    with safe_open(out, "pt") as file:
        assert len(file.metadata()["merganser"]) == 64
    again: list[Path] = []
    mg.run(recipe, out, shard_size=16, resume=True, on_complete=again.append)
    assert again == [out]


@pytest.mark.parametrize("name", ["out.SAFETENSORS", "out.Gguf", "out.BIN"])
def test_endings_in_capitals_are_refused(recipe, tmp_path, name):
    with pytest.raises(InputError, match=r"lower case: out\.|torch files are read but not written"):
        mg.run(recipe, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_file_that_is_there_is_kept(recipe, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        mg.run(recipe, out)
    assert out.read_text() == "mine"
    mg.run(recipe, out, overwrite=True)
    assert load_file(out)["w"].shape == (3, 4)


def test_a_file_that_appears_meanwhile_is_left_alone(recipe, tmp_path):
    out = tmp_path / "out.safetensors"
    with pytest.raises(MerganserError, match="was created since the merge began"):
        mg.run(recipe, out, on_progress=lambda _: out.write_text("mine"))
    assert out.read_text() == "mine"
    mg.run(recipe, out, resume=True, overwrite=True)
    assert load_file(out)["w"].shape == (3, 4)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "out.safetensors", "out.safetensors.lock.json"]


@pytest.mark.parametrize("replace", [False, True])
def test_killed_at_every_boundary(tmp_path, replace):
    disk = Counting()
    (tmp_path / "whole").mkdir()
    whole = tmp_path / "whole" / "out.safetensors"
    if replace:
        whole.write_text("old")
    merge(whole, disk, overwrite=replace, digest="sha256")
    for at in range(len(disk.operations)):
        directory = tmp_path / str(at)
        directory.mkdir()
        out = directory / "out.safetensors"
        if replace:
            out.write_text("old")
        in_child(lambda at=at, out=out: merge(out, Counting(at, end), overwrite=replace, digest="sha256"))
        merge(out, resume=True, overwrite=replace, digest="sha256")
        assert out.read_bytes() == whole.read_bytes(), disk.operations[at]
        assert sorted(os.listdir(directory)) == ["out.safetensors", "out.safetensors.lock.json"], disk.operations[at]
        lock = "out.safetensors.lock.json"
        assert (directory / lock).read_bytes() == whole.with_name(lock).read_bytes(), disk.operations[at]
