"""Models in several folders: what is written loads in the library that wrote the inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import merganser as mg
from merganser.errors import CheckpointError
from support.sentence_models import sentence_model

PAIR = "method: linear\nmodels: [{}, {}]\n"


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
    assert any("2_Dense/model.safetensors of" in note and "is copied unchanged" in note for note in plan.notes)
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


def pipeline(path: Path, value: float) -> Path:
    """A pipeline as diffusers saves it: a network, an autoencoder in shards, a text encoder, a tokenizer."""
    component(path / "unet", value)
    component(path / "vae", 10 * value)
    stem = "diffusion_pytorch_model"
    (path / "vae" / f"{stem}.safetensors").rename(path / "vae" / f"{stem}-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(("conv.weight", "mid.weight"), f"{stem}-00001-of-00001.safetensors")
    (path / "vae" / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "text_encoder").mkdir()
    (path / "text_encoder" / "config.json").write_text('{"model_type": "clip_text_model"}')
    save_file({"layers.0.weight": torch.full((2, 2), -value)}, path / "text_encoder" / "model.safetensors")
    for folder, file in (("tokenizer", "merges.txt"), ("scheduler", "scheduler_config.json")):
        (path / folder).mkdir()
        (path / folder / file).write_text(f'{{"of": "{path.name}"}}')
    listed = {"unet": "UNet", "vae": "VAE", "text_encoder": "CLIP", "tokenizer": "CLIP", "scheduler": "DDIM"}
    index = {"_class_name": "StableDiffusionPipeline", "safety_checker": [None, None]}
    index |= {name: ["diffusers", kind] for name, kind in listed.items()}
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def test_every_component_of_a_pipeline_is_merged(tmp_path: Path) -> None:
    a, b = pipeline(tmp_path / "a", 1.0), pipeline(tmp_path / "b", 3.0)
    assert {name.partition("/")[0] for name in mg.open(a).names()} == {"unet", "vae", "text_encoder"}
    out = mg.run(recipe(tmp_path / "r.yml", PAIR.format(a, b)), tmp_path / "out")
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {
        "README.md",
        "merganser.lock.json",
        "recipe.yml",
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/merges.txt",
        "scheduler/scheduler_config.json",
    }
    assert load_file(out / "vae" / "diffusion_pytorch_model.safetensors")["mid.weight"].unique().tolist() == [20.0]
    assert load_file(out / "text_encoder" / "model.safetensors")["layers.0.weight"].unique().tolist() == [-2.0]
    assert "a" in (out / "tokenizer" / "merges.txt").read_text()


def test_components_are_taken_from_one_model_or_copied(tmp_path: Path) -> None:
    a, b = pipeline(tmp_path / "a", 1.0), pipeline(tmp_path / "b", 3.0)
    text = (
        PAIR.format(a, b)
        + f"""
overrides:
  - {{match: "text_encoder/*", model: {b}}}
output: {{exclude: ["vae/*"], dtype: float16}}
"""
    )
    out = mg.run(recipe(tmp_path / "r.yml", text), tmp_path / "out")
    opened = mg.open(out)
    assert opened["unet/conv.weight"].unique().tolist() == [2.0]
    assert opened["text_encoder/layers.0.weight"].unique().tolist() == [-3.0]
    assert opened.spec("unet/conv.weight").element.name == "float16"
    name = "diffusion_pytorch_model-00001-of-00001.safetensors"
    assert (out / "vae" / name).read_bytes() == (a / "vae" / name).read_bytes()


def test_an_interrupted_pipeline_keeps_what_is_done(tmp_path: Path) -> None:
    a, b = pipeline(tmp_path / "a", 1.0), pipeline(tmp_path / "b", 3.0)
    path = recipe(tmp_path / "r.yml", PAIR.format(a, b))
    calls: list[str] = []

    def stop(progress) -> None:
        calls.append(progress.name)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mg.run(path, tmp_path / "out", workers=1, on_progress=stop)
    again: list[str] = []
    out = mg.run(path, tmp_path / "out", workers=1, resume=True, on_progress=lambda p: again.append(p.name))
    assert len(again) < 5
    assert mg.open(out)["vae/conv.weight"].unique().tolist() == [20.0]


def test_a_pipeline_without_weights_is_refused(tmp_path: Path) -> None:
    path = pipeline(tmp_path / "a", 1.0)
    for file in path.rglob("*.safetensors*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="without the weights of any component"):
        mg.open(path)


def test_a_component_in_shards_of_a_variant_is_merged(tmp_path: Path) -> None:
    """As `save_pretrained(variant="fp16")` writes a large text encoder."""
    shards = {"x": "model.fp16-00001-of-00002.safetensors", "y": "model.fp16-00002-of-00002.safetensors"}
    for name, value in (("a", 1.0), ("b", 3.0)):
        encoder = pipeline(tmp_path / name, value) / "text_encoder"
        encoder.joinpath("model.safetensors").unlink()
        for tensor, file in shards.items():
            save_file({tensor: torch.full((2,), value)}, encoder / file)
        (encoder / "model.safetensors.index.fp16.json").write_text(json.dumps({"weight_map": shards}))
    out = mg.run(PAIR.format(tmp_path / "a", tmp_path / "b"), tmp_path / "out")
    assert mg.open(out)["text_encoder/y"].tolist() == [2.0, 2.0]
    assert not list(out.glob("text_encoder/*.index*"))


def test_a_component_whose_weights_are_not_found_is_refused(tmp_path: Path) -> None:
    path = pipeline(tmp_path / "a", 1.0)
    (path / "text_encoder" / "model.safetensors").rename(
        path / "text_encoder" / "model.fp16-00001-of-00002.safetensors"
    )
    with pytest.raises(CheckpointError, match="text_encoder: no model.safetensors, .* model.fp16-00001-of-00002"):
        mg.open(path)


def test_diffusers_loads_a_merged_pipeline(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    for name in ("a", "b"):
        network = diffusers.UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8),
            norm_num_groups=2, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
        )  # fmt: skip
        diffusers.DDPMPipeline(network, diffusers.DDPMScheduler()).save_pretrained(tmp_path / name)
    path = recipe(tmp_path / "r.yml", PAIR.format(tmp_path / "a", tmp_path / "b"))
    out = mg.run(path, tmp_path / "out")
    loaded, inputs = (diffusers.DDPMPipeline.from_pretrained(each).unet.state_dict() for each in (out, tmp_path / "a"))
    other = diffusers.DDPMPipeline.from_pretrained(tmp_path / "b").unet.state_dict()
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, (inputs[name] + other[name]) / 2)


def test_single_files_of_diffusion_models_merge_into_one(tmp_path: Path) -> None:
    """As webui and ComfyUI keep them: all components under their prefixes in one file."""
    for name, value in (("a", 1.0), ("b", 3.0)):
        prefixes = ("model.diffusion_model.", "first_stage_model.", "cond_stage_model.")
        save_file({f"{each}w": torch.full((4,), value) for each in prefixes}, tmp_path / f"{name}.safetensors")
    text = f"""
method: linear
models: [{tmp_path / "a.safetensors"}, {tmp_path / "b.safetensors"}]
overrides: [{{match: "first_stage_model.*", model: {tmp_path / "b.safetensors"}}}]
"""
    merged = load_file(mg.run(recipe(tmp_path / "r.yml", text), tmp_path / "out.safetensors"))
    assert merged["model.diffusion_model.w"].tolist() == [2.0] * 4
    assert merged["first_stage_model.w"].tolist() == [3.0] * 4


def test_code_that_is_copied_is_noted(tmp_path: Path) -> None:
    a, b = sentence_model(tmp_path / "a", 1.0), sentence_model(tmp_path / "b", 3.0)
    (a / "modeling_duck.py").write_text("print('quack')")
    plan = mg.recipes.plan(mg.recipes.load(PAIR.format(a, b)))
    assert [note for note in plan.notes if "modeling_duck.py" in note and "trust_remote_code" in note]
    assert not mg.recipes.plan(mg.recipes.load(PAIR.format(b, a))).notes
