"""Models in several folders: what is written loads in the library that wrote the inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import merganser as mg
from merganser.errors import CheckpointError

PAIR = "method: linear\nmodels: [{}, {}]\n"


def sentence_model(path: Path, value: float, pickled: bool = False) -> Path:
    """As sentence-transformers saves a transformer, a pooling and a dense layer."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for i, (folder, kind) in enumerate(kinds.items())
    ]
    for folder in ("1_Pooling", "2_Dense"):
        (path / folder).mkdir(parents=True)
        (path / folder / "config.json").write_text(json.dumps({"in_features": 4}))
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "config.json").write_text('{"model_type": "bert"}')
    save_file({"encoder.weight": torch.full((3, 4), value)}, path / "model.safetensors", {"format": "pt"})
    dense = {"linear.weight": torch.full((2, 4), 10 * value), "linear.bias": torch.full((2,), -value)}
    if pickled:
        torch.save(dense, path / "2_Dense" / "pytorch_model.bin")
    else:
        save_file(dense, path / "2_Dense" / "model.safetensors")
    return path


def recipe(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("shard_size", ["5GB", "20B"])
@pytest.mark.parametrize("pickled", [False, True])
def test_dense_layers_are_merged_into_their_own_file(tmp_path: Path, pickled: bool, shard_size: str) -> None:
    a, b = sentence_model(tmp_path / "a", 1.0), sentence_model(tmp_path / "b", 3.0, pickled)
    assert set(mg.open(b).names()) == {"encoder.weight", "2_Dense/linear.weight", "2_Dense/linear.bias"}
    text = PAIR.format(a, b) + f"output: {{shard_size: {shard_size}}}\n"
    out = mg.run(recipe(tmp_path / "r.yml", text), tmp_path / "out")
    dense = load_file(out / "2_Dense" / "model.safetensors")
    assert dense["linear.weight"].unique().tolist() == [20.0]
    assert dense["linear.bias"].unique().tolist() == [-2.0]
    assert load_file(out / "model.safetensors").keys() == {"encoder.weight"}
    assert not list(out.glob("*.index.json"))
    for name in ("modules.json", "2_Dense/config.json", "1_Pooling/config.json"):
        assert (out / name).read_bytes() == (a / name).read_bytes()
    assert not list(out.rglob("*.bin"))
    assert mg.open(out).read("2_Dense/linear.bias").tolist() == [-2.0, -2.0]


def test_a_merge_of_files_copies_the_dense_layer_and_says_so(tmp_path: Path) -> None:
    a, b = (sentence_model(tmp_path / name, value) / "model.safetensors" for name, value in (("a", 1.0), ("b", 3.0)))
    plan = mg.recipes.plan(mg.recipes.load(PAIR.format(a, b)))
    assert any("2_Dense/model.safetensors of" in note and "is copied as it is" in note for note in plan.notes)
    out = mg.run(recipe(tmp_path / "r.yml", PAIR.format(a, b)), tmp_path / "out")
    assert load_file(out / "2_Dense" / "model.safetensors")["linear.bias"].tolist() == [-1.0, -1.0]


def test_a_dense_layer_that_one_model_lacks_is_an_error(tmp_path: Path) -> None:
    a, b = sentence_model(tmp_path / "a", 1.0), sentence_model(tmp_path / "b", 3.0)
    (b / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2_Dense/linear"):
        mg.merge([a, b])


@pytest.mark.parametrize("modules", ["{", "{}", "[3]", '[{"path": "../a"}]', '[{"path": 3}]', '[{"path": "/etc"}]'])
def test_a_list_of_modules_that_lies(tmp_path: Path, modules: str) -> None:
    path = sentence_model(tmp_path / "a", 1.0)
    (path / "modules.json").write_text(modules)
    with pytest.raises(CheckpointError, match=r"modules\.json: "):
        mg.open(path)


def component(path: Path, value: float) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"_class_name": "UNet2DModel", "_diffusers_version": "0.30.0"}')
    tensors = {"conv.weight": torch.full((4, 4), value), "mid.weight": torch.full((4, 4), value)}
    save_file(tensors, path / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    return path


def test_components_of_diffusers_keep_their_file_names(tmp_path: Path) -> None:
    a, b = component(tmp_path / "a", 1.0), component(tmp_path / "b", 3.0)
    out = mg.run(recipe(tmp_path / "r.yml", PAIR.format(a, b)), tmp_path / "out")
    assert load_file(out / "diffusion_pytorch_model.safetensors")["conv.weight"].unique().tolist() == [2.0]
    assert not (out / "model.safetensors").exists()
    text = PAIR.format(a, b) + "output: {shard_size: 64B}\n"
    sharded = mg.run(recipe(tmp_path / "s.yml", text), tmp_path / "sharded")
    index = json.loads((sharded / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)
    }
    assert torch.equal(mg.open(sharded).read("mid.weight"), torch.full((4, 4), 2.0))


def test_pipelines_are_refused_with_their_components(tmp_path: Path) -> None:
    component(tmp_path / "sd" / "unet", 1.0)
    component(tmp_path / "sd" / "vae", 1.0)
    listed = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet"], "vae": ["diffusers", "VAE"]}
    (tmp_path / "sd" / "model_index.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=r"merge each component by itself, such as .*unet \(it has unet, vae\)"):
        mg.open(tmp_path / "sd")


def test_code_that_is_copied_is_noted(tmp_path: Path) -> None:
    a, b = sentence_model(tmp_path / "a", 1.0), sentence_model(tmp_path / "b", 3.0)
    (a / "modeling_duck.py").write_text("print('quack')")
    plan = mg.recipes.plan(mg.recipes.load(PAIR.format(a, b)))
    assert [note for note in plan.notes if "modeling_duck.py of" in note and "trust_remote_code" in note]
    assert not mg.recipes.plan(mg.recipes.load(PAIR.format(b, a))).notes
