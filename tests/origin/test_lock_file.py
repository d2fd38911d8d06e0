"""What a lock file says, against digests that are computed from the files by other means."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.errors import CheckpointError, InputError
from merganser.origin.lock_file import parse_lock
from support.locked_models import digests, make_models


@pytest.mark.parametrize(("method", "algorithm"), [("dare_linear", "sha256"), ("dare_linear", "xxh3_128"),
                                                   ("ties", "sha256"), ("tsv", "sha256")])  # fmt: skip
def test_digests_are_those_of_the_files(models: Path, method: str, algorithm: str) -> None:
    """For rules of every reach: entry by entry, after a reduction, of whole tensors."""
    (models / "recipe.yml").write_text(f"method: {method}\nbase: base\nmodels: [math, code]\n")
    out = mg.run("recipe.yml", "out", digest=algorithm)
    lock = mg.origin.read_lock(out)
    assert lock.digest == algorithm
    assert lock.outputs == {"model.safetensors": digests(out / "model.safetensors", algorithm)}
    floats = {"embed.weight", "layers.0.weight", "norm.weight"}
    for name in ("math", "code"):
        expected = {k: v for k, v in digests(models / name / "model.safetensors", algorithm).items() if k in floats}
        assert lock.sources[f"{name}/model.safetensors"] == expected  # counters are the base's
    assert lock.sources["base/model.safetensors"] == digests(models / "base/model.safetensors", algorithm)
    assert lock.files == {
        name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in ("config.json", "recipe.yml")
    }
    assert [(model.label, model.licence) for model in lock.models] == [
        ("base", "mit"), ("math", "apache-2.0"), ("code", "cc-by-sa-4.0"),
    ]  # fmt: skip


def test_the_same_inputs_give_the_same_lock(
    models: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch
) -> None:
    first = (mg.run("recipe.yml", "out", workers=1) / "merganser.lock.json").read_bytes()
    assert (mg.run("recipe.yml", "again", workers=3) / "merganser.lock.json").read_bytes() == first
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "deeper"
    elsewhere.mkdir()
    make_models(elsewhere)
    shutil.copy("recipe.yml", elsewhere)
    monkeypatch.chdir(elsewhere)
    assert (mg.run("recipe.yml", "out") / "merganser.lock.json").read_bytes() == first
    assert str(models) not in first.decode()


def test_large_merges_use_the_quick_digest(models: Path, monkeypatch) -> None:
    monkeypatch.setattr("merganser.engine.origin.CHEAP", 100)
    assert mg.origin.read_lock(mg.run("recipe.yml", "out")).digest == "xxh3_128"


def test_processes_and_threads_note_the_same(models: Path, monkeypatch) -> None:
    monkeypatch.setattr("merganser.engine.processes._WORTH", 0)
    monkeypatch.setattr("merganser.engine.execute.SPAN", 1 << 14)
    threads = mg.run("recipe.yml", "threads", workers=2)
    forked = mg.run("recipe.yml", "forked", workers=2, processes=True)
    assert (threads / "merganser.lock.json").read_bytes() == (forked / "merganser.lock.json").read_bytes()


def test_what_was_run_with_is_in_the_recipe(models: Path) -> None:
    lock = mg.origin.read_lock(mg.run("recipe.yml", "out", seed=9, dtype="float16", shard_size="200"))
    assert lock.recipe is not None
    assert lock.recipe["seed"] == 9
    assert lock.recipe["output"] == {"dtype": "float16", "shard_size": 200}
    assert len(lock.outputs) > 1
    assert (models / "out/recipe.yml").read_text().startswith("method: dare_linear")


def test_mergekit_recipes_are_kept_in_native_keys(models: Path) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 1}} for m in ("math", "code")]}
    lock = mg.origin.read_lock(mg.run(recipe, "out"))
    assert lock.recipe is not None
    assert lock.recipe["method"] == "linear"
    assert [model["path"] for model in lock.recipe["models"]] == ["math", "code"]


def test_adapters_are_ancestors_of_their_own(models: Path) -> None:
    adapter = models / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["layers.0"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    weights = {
        "base_model.model.layers.0.lora_A.weight": torch.randn(2, 8),
        "base_model.model.layers.0.lora_B.weight": torch.randn(8, 2),
    }
    save_file(weights, adapter / "adapter_model.safetensors")
    lock = mg.origin.read_lock(mg.run({"method": "linear", "models": ["base+adapter", "math"]}, "out"))
    assert [(each.label, each.kind) for each in lock.models[0].made_of] == [("base", "model"), ("adapter", "adapter")]
    assert lock.sources["adapter/adapter_model.safetensors"] == digests(adapter / "adapter_model.safetensors")


def test_nested_merges_and_copies(models: Path) -> None:
    recipe = {
        "method": "linear",
        "models": ["base", {"recipe": {"method": "slerp", "parameters": {"t": 0.5}, "models": ["math", "code"]}}],
    }
    lock = mg.origin.read_lock(mg.run(recipe, "out"))
    assert [each.label for each in lock.models[1].made_of] == ["math", "code"]
    assert {"math/model.safetensors", "code/model.safetensors"} < set(lock.sources)
    copied = mg.origin.read_lock(mg.save("math", "copied"))
    assert copied.sources == {"math/model.safetensors": copied.outputs["model.safetensors"]}
    held = mg.origin.read_lock(mg.save({"w": torch.ones(3)}, "held"))
    assert held.models[0].kind == "memory"
    assert held.sources == {"state dict": held.outputs["model.safetensors"]}


def test_snapshots_of_the_hub_are_known(models: Path) -> None:
    blobs, snapshot = (models / "hub/models--org--name" / each for each in ("blobs", "snapshots/0123abc"))
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    content = (models / "math/model.safetensors").read_bytes()
    blob = blobs / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    (snapshot / "model.safetensors").symlink_to(blob)
    out = mg.run({"method": "linear", "models": [str(snapshot), "code"]}, "out")
    model = mg.origin.read_lock(out).models[0]
    assert (model.repository, model.revision) == ("org/name", "0123abc")
    assert blob.name in (out / "merganser.lock.json").read_text()


def test_the_card_carries_what_the_hub_reads(models: Path) -> None:
    for name in ("math", "code"):
        (models / name / "README.md").write_text("---\nlicense: 'MIT'  # as written\n---\n")
    (models / "org").mkdir()
    (models / "math").rename(models / "org/math")
    recipe = {"method": "linear", "models": ["org/math", "code"]}
    card = (mg.run(recipe, "out") / "README.md").read_text()
    front = card.split("---")[1]
    assert "base_model:\n- org/math\n" in front
    assert "base_model_relation: merge\n" in front
    assert "license: mit\n" in front
    assert "- merge\n" in front


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: other\nlicense_name: my-terms\n---\n", "my-terms"),
        ("---\ntags: [a]\n---\nlicense: mit\n", None),
        ("license: mit\n", None),
        ("---\nlicense: [mit, gpl]\n---\n", None),
        ("\xff", None),
    ],
)
def test_licences_of_cards(tmp_path: Path, card: str, licence: str | None) -> None:
    from merganser.checkpoints.cards import read_licence

    (tmp_path / "README.md").write_bytes(card.encode("latin-1"))
    assert read_licence(tmp_path) == licence


def test_a_digest_that_is_not_known(models: Path) -> None:
    with pytest.raises(InputError, match="unknown digest 'md5'"):
        mg.run("recipe.yml", "out", digest="md5")
    assert not (models / "out").exists()


DAMAGES = {
    "no format": lambda data: data.pop("format"),
    "newer merganser": lambda data: data.update(format=2),
    "digest is none of": lambda data: data.update(digest="md5"),
    "outputs have no digests": lambda data: data["outputs"].update(x={"w": "../etc"}),
    "headers of outputs have no digests": lambda data: data["headers"].clear(),
    "sources have no digests": lambda data: data.update(sources={"x": []}),
    "files have no digests": lambda data: data["files"].update(a=3),
    "of an unknown kind": lambda data: data["models"][0].update(kind={}),
    "has no label": lambda data: data["models"].append(7),
    "made_of is not a list": lambda data: data["models"][0].update(made_of={}),
    "not a text": lambda data: data["models"][0].update(licence=["mit"]),
    "files are not texts": lambda data: data["models"][0].update(files=[1]),
    "recipe is not an object": lambda data: data.update(recipe="x"),
}


@pytest.mark.parametrize("message", list(DAMAGES))
def test_damaged_lock_files_are_refused(models: Path, edit_lock, message: str) -> None:
    out = mg.run("recipe.yml", "out")
    edit_lock(out, DAMAGES[message])
    with pytest.raises(CheckpointError, match=re.escape(message)):
        mg.origin.read_lock(out)


def test_no_lock_file(models: Path) -> None:
    with pytest.raises(CheckpointError, match="base: has no merganser.lock.json"):
        mg.origin.read_lock("base")
    with pytest.raises(CheckpointError, match="has no format"):
        parse_lock({}, "here")
