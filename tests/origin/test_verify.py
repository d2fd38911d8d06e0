"""Damage of every kind is found, and nothing else; forgeries are found by rebuilding."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import merganser as mg
from merganser.errors import CheckpointError, InputError
from support.locked_models import digests


def flip(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_an_untouched_output_is_as_it_was_written(models: Path) -> None:
    out = mg.run("recipe.yml", "out", shard_size="200")
    seen: list[str] = []
    found = mg.origin.verify(out, on_progress=lambda done, total, name: seen.append(name))
    assert (found.tensors, found.problems, found.notes) == (4, (), ())
    assert len(seen) == 4


def test_a_single_bit_is_noticed(models: Path) -> None:
    out = mg.run("recipe.yml", "out")
    flip(out / "model.safetensors")
    (problem,) = mg.origin.verify(out).problems
    assert problem.startswith("model.safetensors: 'layers.0.weight' has changed: sha256 ")


def rewrite_header(file: Path, change) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


HEADERS = {
    "another dtype": lambda header: header["layers.0.weight"].update(dtype="F16"),
    "another shape": lambda header: header["embed.weight"].update(shape=[8, 40]),
    "a tie": lambda header: header["__metadata__"].update(head="embed.weight"),
}


@pytest.mark.parametrize("change", list(HEADERS))
def test_the_same_bytes_under_another_header_are_another_model(models: Path, edit_lock, change: str) -> None:
    out = mg.run("recipe.yml", "out")
    rewrite_header(out / "model.safetensors", HEADERS[change])
    assert any("header has changed" in problem for problem in mg.origin.verify(out).problems)
    content = (out / "model.safetensors").read_bytes()
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    edit_lock(out, lambda data: data["headers"].update({"model.safetensors": hashlib.sha256(header).hexdigest()}))
    assert mg.origin.verify(out).problems == ()
    assert mg.origin.rebuild(out).problems != ()


CHANGES = {
    "config.json has changed": lambda out: (out / "config.json").write_text('{"a": 1}'),
    "recipe.yml is missing": lambda out: (out / "recipe.yml").unlink(),
    "model.safetensors is missing": lambda out: (out / "model.safetensors").unlink(),
    "truncated": lambda out: (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-1]),
    "more.safetensors holds weights": lambda out: save_file({"w": torch.ones(1)}, out / "more.safetensors"),
    "'steps' is missing": lambda out: save_file(
        {k: v for k, v in load_file(out / "model.safetensors").items() if k != "steps"}, out / "model.safetensors"
    ),
    "'own' is not in the lock file": lambda out: save_file(
        {**load_file(out / "model.safetensors"), "own": torch.ones(2)}, out / "model.safetensors"
    ),
}


@pytest.mark.parametrize("message", list(CHANGES))
def test_changes_are_named(models: Path, message: str) -> None:
    out = mg.run("recipe.yml", "out")
    CHANGES[message](out)
    assert any(message in problem for problem in mg.origin.verify(out).problems)


def test_the_card_may_be_edited_and_reports_added(models: Path) -> None:
    out = mg.run("recipe.yml", "out")
    (out / "README.md").write_text("mine")
    (out / "report.html").write_text("mine")
    found = mg.origin.verify(out)
    assert found.problems == ()
    assert found.notes == ("report.html is not in the lock file",)


@pytest.mark.parametrize("name", ["../base/model.safetensors", "/etc/passwd", "a\0b", ""])
def test_a_lock_file_leads_nowhere_else(models: Path, edit_lock, name: str) -> None:
    out = mg.run("recipe.yml", "out")
    edit_lock(out, lambda data: data["files"].update({name: "0" * 64}))
    with pytest.raises(CheckpointError, match="is not the name of a file"):
        mg.origin.verify(out)
    edit_lock(out, lambda data: data["files"].pop(name))
    edit_lock(out, lambda data: (data["outputs"].update({name: {}}), data["headers"].update({name: "0" * 64})))
    for check in (mg.origin.verify, mg.origin.rebuild):
        with pytest.raises(CheckpointError, match="is not the name of a file"):
            check(out)


def test_rebuilding_finds_a_forged_output(models: Path, edit_lock) -> None:
    out = mg.run("recipe.yml", "out")
    assert mg.origin.rebuild(out).problems == ()
    flip(out / "model.safetensors")
    edit_lock(out, lambda data: data["outputs"].update({"model.safetensors": digests(out / "model.safetensors")}))
    assert mg.origin.verify(out).problems == ()
    assert mg.origin.rebuild(out).problems == ("'layers.0.weight' differs in 1 bytes",)


def test_rebuilding_finds_a_changed_source(models: Path) -> None:
    out = mg.run("recipe.yml", "out")
    flip(models / "code/model.safetensors")
    problems = mg.origin.rebuild(out).problems
    assert "source code/model.safetensors: 'layers.0.weight' has changed since the merge" in problems


def test_rebuilding_finds_another_recipe(models: Path, edit_lock) -> None:
    out = mg.run("recipe.yml", "out")
    edit_lock(out, lambda data: data["recipe"].update(seed=6))
    assert len(mg.origin.rebuild(out).problems) == 3
    edit_lock(out, lambda data: data["recipe"].update(seed=5, output={"exclude": ["norm.*"], "dtype": "float32"}))
    problems = mg.origin.rebuild(out).problems
    assert "'norm.weight' is in the lock file, and the recipe does not make it" in problems
    assert "'layers.0.weight' is bfloat16[8, 8], and the recipe makes float32[8, 8]" in problems


def test_rebuilding_a_sample(models: Path) -> None:
    out = mg.run({"method": "linear", "models": ["math", "code"]}, "out")
    found = mg.origin.rebuild(out, sample=2, workers=1)
    assert (found.tensors, found.problems) == (2, ())
    assert mg.origin.rebuild(out, sample=99).tensors == 4


def test_a_rule_that_looks_at_everything_first_is_sampled_soundly(models: Path) -> None:
    """Its look at all tensors must not shrink to the sample."""
    recipe = {"method": "ties", "base": "base", "models": ["math", "code"], "parameters": {"scope": "global"}}
    out = mg.run(recipe, "out")
    for _ in range(3):
        assert mg.origin.rebuild(out, sample=1, workers=1).problems == ()


def test_sources_may_have_moved(models: Path) -> None:
    """Under their old names: random drops are drawn by them."""
    out = mg.run("recipe.yml", "out")
    (models / "elsewhere").mkdir()
    (models / "math").rename(models / "elsewhere/maths")
    with pytest.raises(InputError, match="math: no such"):
        mg.origin.rebuild(out)
    assert mg.origin.rebuild(out, sources={"math": "elsewhere/maths"}).problems == ()
    with pytest.raises(InputError, match="has no model 'mth'"):
        mg.origin.rebuild(out, sources={"math": "elsewhere/maths", "mth": "code"})


def test_relative_paths_start_at_a_root(models: Path, tmp_path_factory, monkeypatch) -> None:
    out = mg.run("recipe.yml", "out").resolve()
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
    assert mg.origin.rebuild(out, root=models).problems == ()


def test_what_no_recipe_made_cannot_be_rebuilt(models: Path) -> None:
    moved = mg.open("base") + 0.5 * mg.TaskVector("math", "base")
    out = mg.save(moved, "out")
    assert mg.origin.verify(out).problems == ()
    assert set(mg.origin.read_lock(out).sources) == {"base/model.safetensors", "math/model.safetensors"}
    with pytest.raises(InputError, match="has no recipe"):
        mg.origin.rebuild(out)


def test_a_resumed_merge_has_the_same_lock(models: Path, monkeypatch) -> None:
    whole = (mg.run("recipe.yml", "whole") / "merganser.lock.json").read_bytes()
    from merganser.engine import compute

    calls: list[str] = []
    digest = compute.Computations.digest

    def stop(self, reads, known):
        calls.append("")
        if len(calls) == 3:
            raise RuntimeError("power cut")
        return digest(self, reads, known)

    monkeypatch.setattr(compute.Computations, "digest", stop)
    with pytest.raises(RuntimeError):
        mg.run("recipe.yml", "out", workers=1)
    monkeypatch.undo()
    monkeypatch.chdir(models)
    read: list[str] = []
    monkeypatch.setattr(
        compute.Computations, "digest", lambda self, r, known: (read.extend(n for _, n in r), digest(self, r, known))[1]
    )
    assert (mg.run("recipe.yml", "out", resume=True) / "merganser.lock.json").read_bytes() == whole
    assert set(read) < {"embed.weight", "layers.0.weight", "norm.weight", "steps"}


def test_a_copy_of_an_output_is_as_good(models: Path) -> None:
    out = mg.run("recipe.yml", "out")
    shutil.copytree(out, models / "copy")
    assert mg.origin.verify(models / "copy").problems == ()
    assert json.loads((out / "merganser.lock.json").read_text())["format"] == 1
