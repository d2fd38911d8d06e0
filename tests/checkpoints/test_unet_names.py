"""Names and depths of diffusion models, against diffusers' own conversion and tiny networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.checkpoints.unet_names import translate_names
from merganser.recipes.layers import chain_depths

diffusers = pytest.importorskip("diffusers")
COMMON = {"sample_size": 8, "cross_attention_dim": 8, "norm_num_groups": 2, "attention_head_dim": 2}
#: Settings of tiny networks with the blocks of the real ones, and how many positions of depth they have.
UNETS: dict[str, tuple[dict[str, Any], int]] = {
    "sd1": ({"block_out_channels": (4, 8, 8, 8), "layers_per_block": 2}, 25),
    "sdxl": (
        {
            "block_out_channels": (4, 8, 8),
            "layers_per_block": 2,
            "transformer_layers_per_block": (1, 2, 2),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 16,
        },
        19,
    ),
}


@pytest.fixture(scope="module", params=UNETS)
def unet(request: pytest.FixtureRequest) -> tuple[Any, int]:
    settings, positions = UNETS[request.param]
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(**COMMON, **settings), positions


def test_diffusers_converts_to_the_same_names(unet: tuple[Any, int]) -> None:
    convert = pytest.importorskip("diffusers.loaders.single_file_utils").convert_ldm_unet_checkpoint
    network, _ = unet
    weights = network.state_dict()
    names = translate_names(weights)
    assert set(names) == set(weights)
    single = {f"model.diffusion_model.{other}": weights[name] for name, other in names.items()}
    converted = convert(dict(single), {**network.config})
    assert converted.keys() == weights.keys()
    assert all(torch.equal(converted[name], weight) for name, weight in weights.items())
    assert translate_names([name.removeprefix("model.diffusion_model.") for name in single]) == {
        other: name for name, other in names.items()
    }


def test_depth_goes_down_through_the_middle_and_up(unet: tuple[Any, int]) -> None:
    network, positions = unet
    names = translate_names(network.state_dict())
    depths, others = chain_depths(names), chain_depths(names.values())
    assert {name: depths[name] for name in depths} == {name: others[names[name]] for name in depths}
    steps = sorted({round(depth * (positions - 1), 6) for depth in depths.values()})
    assert steps == list(range(positions))
    assert depths["conv_in.weight"] == 0
    assert depths["mid_block.resnets.1.conv1.weight"] == 0.5
    last = len(network.up_blocks) - 1
    assert depths[f"up_blocks.{last}.resnets.2.conv1.weight"] == 1
    assert depths["up_blocks.0.upsamplers.0.conv.weight"] == depths["up_blocks.0.resnets.2.conv1.weight"]
    assert depths["up_blocks.0.upsamplers.0.conv.weight"] < depths["up_blocks.1.resnets.0.conv1.weight"]


def test_lora_files_in_both_names_over_both_bases(tmp_path: Path, unet: tuple[Any, int]) -> None:
    network, _ = unet
    weights = network.state_dict()
    names = translate_names(weights)
    network.save_pretrained(tmp_path / "unet")
    save_file(
        {f"model.diffusion_model.{other}": weights[name].contiguous() for name, other in names.items()},
        tmp_path / "single.safetensors",
    )
    changed = [name for name in names if ".attn1.to_q.weight" in name or name.endswith(".conv1.weight")]
    factors = {
        name: (
            torch.randn(2, *weights[name].shape[1:]),
            torch.randn(len(weights[name]), 2, *[1] * (weights[name].ndim - 2)),
        )
        for name in changed
    }
    for file, naming in (("diffusers", {name: name for name in names}), ("ldm", names)):
        flat = {name: "lora_unet_" + naming[name].removesuffix(".weight").replace(".", "_") for name in changed}
        tensors = {f"{flat[n]}.lora_down.weight": down for n, (down, _) in factors.items()}
        save_file(
            tensors | {f"{flat[n]}.lora_up.weight": up for n, (_, up) in factors.items()},
            tmp_path / f"{file}.safetensors",
        )
        for base, shown in (
            ("unet", {n: n for n in names}),
            ("single.safetensors", {n: f"model.diffusion_model.{o}" for n, o in names.items()}),
        ):
            adapted = mg.open(f"{tmp_path / base}+{tmp_path / file}.safetensors")
            for name, (down, up) in factors.items():
                moved = adapted.read(shown[name]) - weights[name]
                expected = (up.flatten(1) @ down.flatten(1)).reshape(moved.shape)
                torch.testing.assert_close(moved, expected, atol=1e-4, rtol=1e-4)


def test_weights_over_the_depth_of_a_network(tmp_path: Path, unet: tuple[Any, int]) -> None:
    network, positions = unet
    weights = network.state_dict()
    for value, name in enumerate(("zeros", "ones")):
        (tmp_path / name).mkdir()
        save_file(
            {k: torch.full_like(v, value).contiguous() for k, v in weights.items()},
            tmp_path / name / "diffusion_pytorch_model.safetensors",
        )
        (tmp_path / name / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    own = [round((i * 7 % positions) / positions, 3) for i in range(positions)]
    recipe = {
        "method": "task_arithmetic",
        "base": str(tmp_path / "zeros"),
        "models": [{"path": str(tmp_path / "ones"), "parameters": {"weight": own}}],
    }
    out = mg.open(mg.run(recipe, tmp_path / "out"))
    depths = chain_depths(weights)
    for name, depth in depths.items():
        assert out.read(name).flatten()[0].item() == pytest.approx(own[round(depth * (positions - 1))], abs=1e-5)
    assert out.read("time_embedding.linear_1.weight").flatten()[0].item() == pytest.approx(own[0], abs=1e-5)
    assert out.read("conv_out.weight").flatten()[0].item() == pytest.approx(own[-1], abs=1e-5)


def test_flux_is_one_stretch_and_sd3_one_stack() -> None:
    flux = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    )
    depths = chain_depths(flux.state_dict())
    assert depths["transformer_blocks.0.norm1.linear.weight"] == 0
    assert depths["transformer_blocks.1.norm1.linear.weight"] == 0.25
    assert depths["single_transformer_blocks.0.norm.linear.weight"] == 0.5
    assert depths["single_transformer_blocks.2.norm.linear.weight"] == 1
    assert chain_depths(["transformer_blocks.0.attn.to_q.weight", "transformer_blocks.1.attn.to_q.weight"]) == {}
    single = chain_depths(["double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight"])
    assert list(single.values()) == [0, 1]


def test_components_of_a_pipeline_each_have_their_depth() -> None:
    names = [
        f"{part}/{name}.weight"
        for part in ("unet", "vae/encoder")
        for name in ("conv_in", "down_blocks.0.resnets.0.a", "mid_block.x")
    ]
    assert [chain_depths(names)[name] for name in names] == [0, 0.5, 1] * 2
