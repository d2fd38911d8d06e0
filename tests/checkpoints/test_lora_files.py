"""LoRA files of kohya, LyCORIS and diffusers over a component of a pipeline, against naive matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.errors import CheckpointError

Q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
OUT = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0"
CONV = "down_blocks.0.resnets.0.conv1"
FLAT = {name: f"lora_unet_{name.replace('.', '_')}" for name in (Q, OUT, CONV)}


@pytest.fixture
def unet(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        f"{Q}.weight": torch.randn(8, 8),
        f"{OUT}.weight": torch.randn(8, 6),
        f"{CONV}.weight": torch.randn(8, 4, 3, 3),
    }
    (tmp_path / "unet").mkdir()
    save_file(tensors, tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    return tmp_path / "unet"


def changes(unet: Path, file: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    save_file(tensors, file)
    base, adapted = mg.open(unet), mg.open(f"{unet}+{file}")
    for name in base.names():
        assert torch.allclose(adapted.read(name, (2, 5)), adapted.read(name)[2:5], atol=1e-6)
    return {name.removesuffix(".weight"): adapted.read(name) - base.read(name) for name in base.names()}


def test_kohya_and_locon(unet: Path, tmp_path: Path) -> None:
    down, up, conv_down, conv_up = (
        torch.randn(2, 8),
        torch.randn(8, 2),
        torch.randn(2, 4, 3, 3),
        torch.randn(8, 2, 1, 1),
    )
    found = changes(
        unet,
        tmp_path / "kohya.safetensors",
        {
            f"{FLAT[Q]}.lora_down.weight": down,
            f"{FLAT[Q]}.lora_up.weight": up,
            f"{FLAT[Q]}.alpha": torch.tensor(1.0),
            f"{FLAT[CONV]}.lora_down.weight": conv_down,
            f"{FLAT[CONV]}.lora_up.weight": conv_up,
            "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.randn(2, 4),
            "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": torch.randn(4, 2),
        },
    )
    torch.testing.assert_close(found[Q], up @ down / 2, atol=1e-5, rtol=1e-4)
    expected = (conv_up[:, :, 0, 0] @ conv_down.flatten(1)).reshape(8, 4, 3, 3)
    torch.testing.assert_close(found[CONV], expected, atol=1e-5, rtol=1e-4)
    assert not found[OUT].any()
    recipe = mg.recipes.load({"method": "passthrough", "models": [f"{unet}+{tmp_path / 'kohya.safetensors'}"]})
    notes = mg.recipes.prepare(recipe).plan.notes
    assert any("1 modules of lora_te do not belong to" in note for note in notes)


def test_locon_with_a_core(unet: Path, tmp_path: Path) -> None:
    up, mid, down = torch.randn(8, 2, 1, 1), torch.randn(2, 2, 3, 3), torch.randn(2, 4, 1, 1)
    parts = {"up": up, "mid": mid, "down": down}
    tensors = {f"{FLAT[CONV]}.lora_{part}.weight": tensor for part, tensor in parts.items()}
    found = changes(unet, tmp_path / "core.safetensors", tensors)[CONV]
    composed = sum(
        up[:, i, 0, 0][:, None, None, None] * mid[i, j] * down[j, :, 0, 0][None, :, None, None]
        for i in range(2)
        for j in range(2)
    )
    torch.testing.assert_close(found, composed, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "names",
    [
        (
            f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight", f"unet.{OUT}.lora_A.weight",
            f"unet.{OUT}.lora_B.weight",
        ),
        (
            f"unet.{Q}.lora.down.weight", f"unet.{Q}.lora.up.weight", f"unet.{OUT}.lora.down.weight",
            f"unet.{OUT}.lora.up.weight",
        ),
        (
            f"unet.{Q[:-5]}.processor.to_q_lora.down.weight", f"unet.{Q[:-5]}.processor.to_q_lora.up.weight",
            f"unet.{Q[:-5]}.processor.to_out_lora.down.weight", f"unet.{Q[:-5]}.processor.to_out_lora.up.weight",
        ),
    ],
)  # fmt: skip
def test_names_of_diffusers(unet: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    tensors = [torch.randn(2, 8), torch.randn(8, 2), torch.randn(2, 6), torch.randn(8, 2)]
    found = changes(unet, tmp_path / "lora.safetensors", dict(zip(names, tensors, strict=True)))
    torch.testing.assert_close(found[Q], tensors[1] @ tensors[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[OUT], tensors[3] @ tensors[2], atol=1e-5, rtol=1e-4)


def test_loha_and_lokr(unet: Path, tmp_path: Path) -> None:
    a, b, c, d = torch.randn(8, 2), torch.randn(2, 8), torch.randn(8, 2), torch.randn(2, 8)
    w1, w2_a, w2_b = torch.randn(2, 3), torch.randn(4, 1), torch.randn(1, 2)
    found = changes(
        unet,
        tmp_path / "lycoris.safetensors",
        {
            f"{FLAT[Q]}.hada_w1_a": a, f"{FLAT[Q]}.hada_w1_b": b, f"{FLAT[Q]}.hada_w2_a": c, f"{FLAT[Q]}.hada_w2_b": d,
            f"{FLAT[Q]}.alpha": torch.tensor(4.0),
            f"{FLAT[OUT]}.lokr_w1": w1, f"{FLAT[OUT]}.lokr_w2_a": w2_a, f"{FLAT[OUT]}.lokr_w2_b": w2_b,
            f"{FLAT[OUT]}.alpha": torch.tensor(0.5),
        },
    )  # fmt: skip
    torch.testing.assert_close(found[Q], 2 * (a @ b) * (c @ d), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[OUT], 0.5 * torch.kron(w1, w2_a @ w2_b), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{FLAT[Q]}.lora_down.weight": (2, 8)}, "has no lora_B"),
        ({f"{FLAT[Q]}.lora_down.weight": (2, 8), f"{FLAT[Q]}.dora_scale": (8, 1)}, "dora_scale' is not a known"),
        ({"lora_unet_mid.lora_down.weight": (2, 8), "lora_unet_mid.lora_up.weight": (8, 2)}, "changes 'lora_unet_mid'"),
        (
            {f"{FLAT[Q]}.lora_down.weight": (2, 8), f"{FLAT[Q]}.lora_up.weight": (8, 2),
             "lora_unet_mid.lora_down.weight": (2, 8), "lora_unet_mid.lora_up.weight": (8, 2)},
            "changes 'lora_unet_mid'",
        ),
        ({f"{FLAT[Q]}.lora_down.weight": (2, 9), f"{FLAT[Q]}.lora_up.weight": (8, 2)}, r"fits \[8, 9\], the base has"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(unet: Path, tmp_path: Path, tensors: Any, message: str) -> None:
    file = tmp_path / "lora.safetensors"
    save_file({name: torch.randn(shape) for name, shape in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=message):
        mg.open(f"{unet}+{file}")
