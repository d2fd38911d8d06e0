"""LoRA files of Flux in either layout over bases in either layout: against diffusers' conversion of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.checkpoints.flux_names import flux_places
from merganser.errors import CheckpointError

diffusers = pytest.importorskip("diffusers")
HIDDEN, RANK = 16, 2


@pytest.fixture(scope="module")
def layouts() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a small Flux as diffusers has them, and as a single file has them."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=6, guidance_embeds=True, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    split = {name: value.detach().clone() for name, value in model.state_dict().items()}
    shapes = {name.removesuffix(".weight"): tuple(v.shape) for name, v in split.items() if name.endswith(".weight")}
    fused = {}
    for module, places in flux_places(shapes).items():
        for end in (".weight", ".bias"):
            fused[module + end] = torch.cat([split[place.module + end] for place in places])
    for i in range(2):
        for side, (q, k) in {"img": ("norm_q", "norm_k"), "txt": ("norm_added_q", "norm_added_k")}.items():
            for kind, part in (("query", q), ("key", k)):
                name = f"double_blocks.{i}.{side}_attn.norm.{kind}_norm.scale"
                fused[name] = split[f"transformer_blocks.{i}.attn.{part}.weight"]
        for kind, part in (("query", "norm_q"), ("key", "norm_k")):
            fused[f"single_blocks.{i}.norm.{kind}_norm.scale"] = split[
                f"single_transformer_blocks.{i}.attn.{part}.weight"
            ]
    for end in (".weight", ".bias"):  # diffusers has scale and shift in the other order
        scale, shift = split["norm_out.linear" + end].chunk(2)
        fused["final_layer.adaLN_modulation.1" + end] = torch.cat([shift, scale])
    return split, fused


def test_diffusers_converts_to_the_same_weights(layouts, monkeypatch):
    from diffusers.loaders import single_file_utils

    split, fused = layouts
    cut = torch.split
    monkeypatch.setattr(  # the width of Flux is a constant there
        single_file_utils.torch,
        "split",
        lambda tensor, sizes, dim: cut(tensor, [n * HIDDEN // 3072 for n in sizes], dim),
    )
    given = {name: value.clone() for name, value in fused.items()}
    converted = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers(given)
    assert converted.keys() == split.keys()
    for name, value in split.items():
        assert torch.equal(converted[name], value), name


def factors(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(RANK, shape[1]), torch.randn(shape[0], RANK)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("base", ["split", "fused"])
@pytest.mark.parametrize("file", ["kohya", "diffusers"])
def test_files_in_both_layouts_over_both_bases(file, base, prefix, layouts, tmp_path: Path):
    """The result in the base's layout is that of merging in the file's own layout and converting."""
    split, fused = layouts
    torch.manual_seed(1)
    own, spelled = (
        (fused, "lora_unet_{}.lora_{}.weight") if file == "kohya" else (split, "transformer.{}.lora_{}.weight")
    )
    chosen = [
        name.removesuffix(".weight")
        for name, value in own.items()
        if name.endswith(".weight") and value.dim() == 2 and "adaLN" not in name and "norm_out" not in name
        and not (file == "diffusers" and "1.attn.to_k" in name)  # keys of some layers are not trained
    ]  # fmt: skip
    tensors, changed = {}, {name: value.clone() for name, value in own.items()}
    for module in chosen:
        down, up = factors(tuple(own[f"{module}.weight"].shape))
        flat = module.replace(".", "_") if file == "kohya" else module
        for part, value in zip(("down", "up") if file == "kohya" else "AB", (down, up), strict=True):
            tensors[spelled.format(flat, part)] = value
        if file == "kohya":
            tensors[f"lora_unet_{flat}.alpha"] = torch.tensor(1.0)
        changed[f"{module}.weight"] += up @ down * (1 / RANK if file == "kohya" else 1)
    save_file(tensors, tmp_path / "lora.safetensors")
    save_file({prefix + n: v for n, v in (split if base == "split" else fused).items()}, tmp_path / "base.safetensors")
    shapes = {n.removesuffix(".weight"): tuple(v.shape) for n, v in split.items() if n.endswith(".weight")}
    expected = changed
    if file == "kohya" and base == "split":
        expected = {
            place.module: changed[f"{module}.weight"][place.offset : place.offset + place.stop]
            for module, places in flux_places(shapes).items() for place in places
        }  # fmt: skip
        expected = {f"{module}.weight": value for module, value in expected.items()}
    elif file == "diffusers" and base == "fused":
        expected = {
            f"{module}.weight": torch.cat([changed[f"{place.module}.weight"] for place in places])
            for module, places in flux_places(shapes).items()
        }
    adapted = mg.open(f"{tmp_path / 'base.safetensors'}+{tmp_path / 'lora.safetensors'}")
    for name, value in expected.items():
        torch.testing.assert_close(adapted[prefix + name], value, rtol=1e-5, atol=1e-5)
        rows = (len(value) // 3, len(value) - 1)
        torch.testing.assert_close(adapted.read(prefix + name, rows), value[slice(*rows)], rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_fit_are_refused(layouts, tmp_path: Path):
    split, _ = layouts
    save_file(split, tmp_path / "base.safetensors")
    down, up = factors((2 * HIDDEN, HIDDEN))
    module = "lora_unet_double_blocks_0_img_attn_qkv"
    save_file({f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up}, tmp_path / "lora.safetensors")
    with pytest.raises(CheckpointError, match=r"attn.to_q.weight' fits \[32, 16\], the base has \[16, 16\]"):
        mg.open(f"{tmp_path / 'base.safetensors'}+{tmp_path / 'lora.safetensors'}")
