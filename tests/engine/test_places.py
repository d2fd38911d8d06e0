"""A merge is the same whatever directory it is started in and however its files are named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.checkpoints.base import Checkpoint, View
from support.sentence_models import sentence_model
from support.small_gguf import llama, write

TENSORS = {f"layers.{i}.weight": torch.arange(12.0).view(3, 4) + i for i in range(3)}
RECIPE = {"method": "linear", "models": ["a", "b"]}


def directory(path: Path, value: float) -> Path:
    path.mkdir()
    save_file({name: value * tensor for name, tensor in TENSORS.items()}, path / "model.safetensors")
    return path


def quantised(path: Path, value: float) -> Path:
    """A model in FP8 with a scale for each tensor."""
    path.mkdir()
    weight = torch.full((4, 4), value).to(torch.float8_e4m3fn)
    tensors = {f"{name}.weight": weight.clone() for name in "vw"}
    save_file(tensors | {f"{name}.weight_scale": torch.ones(()) for name in "vw"}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "compressed-tensors"}}))
    return path


def gguf_file(path: Path, value: float) -> Path:
    pytest.importorskip("gguf")
    return write(path, {name: np.float32(value) * each for name, each in llama().items()})


MODELS: dict[str, Callable[[Path, float], Path]] = {
    "directory": directory, "quantised": quantised, "gguf": gguf_file, "modules": sentence_model,
}  # fmt: skip


def stop(progress: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("nested", [False, True])
def test_an_unfinished_merge_goes_on_from_elsewhere(tmp_path, monkeypatch, kind: str, nested: bool) -> None:
    a, b = names = ["a.gguf", "b.gguf"] if kind == "gguf" else ["a", "b"]
    for name, value in zip(names, (1.0, 2.0), strict=True):
        MODELS[kind](tmp_path / name, value)
    document = RECIPE | {"models": [RECIPE | {"models": [b, a]} if nested else a, b]}
    (tmp_path / "recipe.yml").write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)
    whole = mg.run("recipe.yml", "whole")
    with pytest.raises(KeyboardInterrupt):
        mg.run("recipe.yml", "out", workers=1, on_progress=stop)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    redone: list[str] = []
    out = mg.run(
        tmp_path / "recipe.yml", "../out", workers=1, resume=True, on_progress=lambda done: redone.append(done.name)
    )
    monkeypatch.chdir(tmp_path)
    files = {path.relative_to(whole) for path in whole.rglob("*") if path.is_file()}
    assert files == {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for file in files:
        assert (whole / file).read_bytes() == (tmp_path / "out" / file).read_bytes(), file
    assert len(redone) < len(mg.open(whole).names())
    assert out == Path("../out")


def test_other_work_is_still_refused(tmp_path, monkeypatch) -> None:
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        directory(tmp_path / name, value)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        mg.run(RECIPE, "out", workers=1, on_progress=stop)
    for other in (
        RECIPE | {"models": ["b", "a"]},
        RECIPE | {"models": ["a", "c"]},
        RECIPE | {"output": {"shard_size": "60B"}},
        RECIPE | {"output": {"dtype": "float16"}},
    ):
        with pytest.raises(mg.errors.InputError, match="started with another recipe"):
            mg.run(other, "out", resume=True)


VIEWS: dict[str, Callable[[str], Checkpoint]] = {
    "a view": lambda place: view(place, "and more"),
    "FP8": lambda place: mg.open(f"{place}/fp8"),
    "GGUF": lambda place: mg.open(f"{place}/m.gguf"),
    "modules": lambda place: mg.open(f"{place}/sentences"),
    "a task vector": lambda place: vector(place),
    "a stored vector": lambda place: mg.TaskVector.load(f"{place}/a"),
    "a sum": lambda place: 0.5 * vector(place) + mg.TaskVector.load(f"{place}/a"),
    "some of it": lambda place: vector(place).only("layers.0.*").top(0.5).low_rank(1),
    "masked": lambda place: vector(place).masked(mg.TaskVector.load(f"{place}/a")),
    "agreeing": lambda place: vector(place).agreeing(mg.TaskVector.load(f"{place}/a")),
    "applied": lambda place: mg.open(f"{place}/b") + vector(place),
}


def view(place: str, what: str) -> View:
    source = mg.open(f"{place}/a")
    return View(source, f"{source.label} {what}")


def vector(place: str) -> mg.TaskVector:
    return mg.TaskVector(f"{place}/a", f"{place}/b")


@pytest.mark.parametrize("kind", list(VIEWS))
def test_fingerprints_are_of_content(tmp_path: Path, monkeypatch, kind: str) -> None:
    for name in "xy":
        home = tmp_path / name
        home.mkdir()
        directory(home / "a", 1.0)
        directory(home / "b", 2.0)
        quantised(home / "fp8", 1.0)
        sentence_model(home / "sentences", 1.0)
        if kind == "GGUF":
            gguf_file(home / "m.gguf", 1.0)
    monkeypatch.chdir(tmp_path / "x")
    made = [VIEWS[kind](place).fingerprint() for place in (".", "../x", str(tmp_path / "x"), os.path.join("..", "y"))]
    assert len(set(made)) == 1


def test_views_that_differ_have_other_fingerprints(tmp_path: Path) -> None:
    a, b = directory(tmp_path / "a", 1.0), directory(tmp_path / "b", -2.0)
    one, two = mg.TaskVector(a, b), mg.TaskVector.load(a)
    made: list[Checkpoint] = [
        mg.open(a), mg.open(b), View(mg.open(a), f"{a} once"), View(mg.open(a), f"{a} twice"), one, two, -one,
        one.masked(two), one.agreeing(two), one.top(0.5), one.top(0.5, by=two), one.low_rank(1), one.only("layers.0.*"),
    ]  # fmt: skip
    assert len({each.fingerprint() for each in made}) == len(made)
