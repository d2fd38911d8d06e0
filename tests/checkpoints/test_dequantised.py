"""Quantised checkpoints read as weights: against what the libraries that store them read back, and naive decoders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import merganser as mg
from merganser.checkpoints import dequantised as dequantising
from merganser.checkpoints.codecs.base import Codec
from merganser.checkpoints.codecs.formats import FORMATS
from merganser.checkpoints.codecs.packing import unpack_stream
from merganser.checkpoints.dequantised import Dequantised
from merganser.errors import CheckpointError

RECORDED = Path(__file__).parent / "recorded"
MODULE = "model.layers.0.mlp.up_proj"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "torch_dtype": "float16",
}
#: bitsandbytes decodes int8 to float16; compressed-tensors rounds the scale of a whole NVFP4 tensor.
ROUNDED = {"bitsandbytes-int8": 1e-3, "compressed-nvfp4": 1e-4}
KINDS = sorted(path.stem for path in RECORDED.glob("*.safetensors") if path.stem != "expected")


def directory(place: Path, tensors, settings=None, **config) -> Path:
    place.mkdir()
    save_file(tensors, place / "model.safetensors")
    quantised = {} if settings is None else {"quantization_config": settings}
    (place / "config.json").write_text(json.dumps({**CONFIG, **quantised, **config}))
    return place


def recorded(kind: str, place: Path) -> Path:
    with safe_open(RECORDED / f"{kind}.safetensors", "pt") as file:
        settings = json.loads(file.metadata()["quantization_config"])
    return directory(place, load_file(RECORDED / f"{kind}.safetensors"), settings)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_the_library_reads(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(dequantising, "_CHUNK", 500)
    if kind in ("quanto-qint2", "quanto-qint4"):
        pytest.importorskip("transformers", reason="the shape of the weight is that of the architecture")
    opened = mg.open(recorded(kind, tmp_path / "m"))
    expected = load_file(RECORDED / "expected.safetensors")[kind]
    (name,) = opened.names()
    assert name == (f"{MODULE}.gate_up_proj" if kind == "mxfp4" else f"{MODULE}.weight")
    assert opened.spec(name) == mg.checkpoints.TensorSpec(tuple(expected.shape), "float16")
    whole = opened.read(name)
    assert whole.dtype is torch.float32
    torch.testing.assert_close(whole, expected, rtol=ROUNDED.get(kind, 1e-6), atol=1e-6)
    for rows in ((0, 1), (1, 2), (1, len(whole)), (len(whole) // 3, len(whole) // 2), (0, 0)):
        assert torch.equal(opened.read(name, rows), whole[slice(*rows)])


def test_every_kind_is_recorded():
    assert len(KINDS) >= 14
    assert set(load_file(RECORDED / "expected.safetensors")) == set(KINDS)


def test_the_guide_says_how_every_form_is_recognised():
    guide = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    for form in FORMATS:
        for sign in re.findall(r"`([^`]+)`", form.recognised):
            assert sign in guide, f"{form.name}: {sign}"


def stream(values, bits: int) -> np.ndarray:
    """Pack codes into 32-bit integers as one number whose lowest bits are the first code."""
    whole = sum(int(value) << (bits * place) for place, value in enumerate(values))
    words = len(values) * bits // 32
    return np.array([(whole >> (32 * word)) & 0xFFFFFFFF for word in range(words)], np.uint32).view(np.int32)


@given(st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_streams_of_bits(bits, length, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, 32 * length)
    assert unpack_stream(torch.from_numpy(stream(codes, bits)), bits).tolist() == codes.tolist()


def gptq(bits: int, form: str, ordered: bool):
    """A GPTQ layer packed value by value, and the weight it stands for."""
    random = np.random.default_rng(bits)
    codes = random.integers(0, 2**bits, (96, 64))
    zeros = random.integers(0, 2**bits, (3, 64))
    scales = random.random((3, 64)).astype(np.float16)
    groups = random.permutation(np.arange(96) // 32) if ordered else np.arange(96) // 32
    kept = zeros if form == "gptq_v2" else (zeros - 1) % 2**bits
    tensors = {
        "qweight": np.stack([stream(column, bits) for column in codes.T], 1),
        "qzeros": np.stack([stream(row, bits) for row in kept]),
        "scales": scales,
        "g_idx": groups.astype(np.int32),
    }
    weight = (codes - zeros[groups]) * scales[groups].astype(np.float32)
    return {f"{MODULE}.{name}": torch.from_numpy(each) for name, each in tensors.items()}, torch.from_numpy(weight.T)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits, form, ordered, tmp_path):
    tensors, weight = gptq(bits, form, ordered)
    settings = {"quant_method": "gptq", "bits": bits, "checkpoint_format": form, "desc_act": ordered}
    opened = mg.open(directory(tmp_path / "m", tensors, settings))
    assert opened.names() == [f"{MODULE}.weight"]
    torch.testing.assert_close(opened[f"{MODULE}.weight"], weight.float())
    assert torch.equal(opened.read(f"{MODULE}.weight", (7, 30)), opened[f"{MODULE}.weight"][7:30])
    del tensors[f"{MODULE}.g_idx"]
    if not ordered:
        again = mg.open(directory(tmp_path / "without", tensors, settings))
        assert torch.equal(again[f"{MODULE}.weight"], opened[f"{MODULE}.weight"])


def float8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("codes", "scale", "name"),
    [
        (float8(300, 200), torch.rand(3, 2) + 0.5, "weight_scale_inv"),
        (float8(64, 96), torch.tensor(0.25), "weight_scale"),
        (float8(64, 96), torch.tensor([0.25]), "scale_weight"),
        (float8(64, 96), torch.rand(64), "weight_scale"),
        (float8(64, 96), torch.rand(64, 1), "weight_scale"),
        (float8(64, 96), torch.rand(2, 3), "weight_scale_inv"),
        (float8(3, 64, 96), torch.rand(3, 1, 1), "weight_scale"),
        (float8(3, 256, 384), torch.rand(3, 2, 3), "weight_scale_inv"),
        (float8(64, 96).float().to(torch.float8_e5m2), torch.rand(1, 96), "weight_scale"),
        (float8(64, 96), torch.randint(120, 130, (64, 3)).to(torch.uint8), "weight_scale_inv"),
        (float8(64, 96), torch.rand(64, 3).to(torch.float8_e8m0fnu), "weight_scale"),
    ],
)
def test_float8_by_tensor_row_and_block(codes, scale, name, tmp_path):
    tensors = {"up.weight": codes, f"up.{name}": scale, "up.input_scale": torch.ones(()), "norm.weight": torch.ones(4)}
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]} if max(codes.shape) > 96 else None
    opened = mg.open(directory(tmp_path / "m", tensors, settings))
    assert set(opened.names()) == {"up.weight", "norm.weight"}
    values = codes.float().numpy()
    factors = torch.exp2(scale.float() - 127) if scale.dtype is torch.uint8 else scale.float()
    grid = factors.numpy() if factors.numel() > 1 else factors.reshape(-1)[0].numpy()
    for axis in range(values.ndim if factors.numel() > 1 else 0):
        if axis >= grid.ndim:
            grid = grid[..., None]
        block = 128 if settings and axis >= values.ndim - 2 else values.shape[axis] // grid.shape[axis]
        if grid.shape[axis] > 1:
            grid = np.repeat(grid, block, axis).take(range(values.shape[axis]), axis)
    torch.testing.assert_close(opened["up.weight"], torch.from_numpy(values * grid))
    assert torch.equal(opened.read("up.weight", (1, 3)), opened["up.weight"][1:3])


@pytest.mark.parametrize("kind", KINDS)
def test_codes_that_do_not_fit_are_refused_before_work(kind, tmp_path):
    tensors = load_file(RECORDED / f"{kind}.safetensors")
    with safe_open(RECORDED / f"{kind}.safetensors", "pt") as file:
        settings = json.loads(file.metadata()["quantization_config"])
    scale = next(name for name in tensors if re.search(r"(?<!put_)scales?$|absmax$|SCB$", name))
    grown = torch.cat([torch.atleast_1d(tensors[scale])] * 7)
    with pytest.raises(CheckpointError, match="the file is damaged"):
        mg.open(directory(tmp_path / "m", {**tensors, scale: grown}, settings))


@pytest.mark.parametrize(
    ("method", "settings"),
    [("gptq", {"checkpoint_format": "marlin"}), ("awq", {"version": "gemv"}), ("something-new", {})],
)
def test_forms_that_nothing_here_knows_stay_refused(method, settings, tmp_path):
    tensors, _ = gptq(4, "gptq", ordered=False)
    place = directory(tmp_path / "m", tensors, {"quant_method": method, **settings})
    assert not isinstance(mg.open(place), Dequantised)
    with pytest.raises(CheckpointError, match="a quantised weight cannot be merged"):
        mg.run({"method": "linear", "models": [str(place), str(place) + "/../m/"]}, tmp_path / "out")


def test_a_weight_that_is_stored_twice_is_refused(tmp_path):
    tensors, _ = gptq(4, "gptq", ordered=False)
    both = {**tensors, f"{MODULE}.weight": torch.zeros(64, 96)}
    with pytest.raises(CheckpointError, match="is stored in two formats"):
        mg.open(directory(tmp_path / "m", both, {"quant_method": "gptq"}))


def test_learned_scales_are_kept_beside_codes(tmp_path):
    tensors = {"up.weight": float8(8, 8), "up.weight_scale": torch.ones(8), "attn.q_scale": torch.ones(4)}
    assert set(mg.open(directory(tmp_path / "m", tensors)).names()) == {"up.weight", "attn.q_scale"}


def test_groups_that_are_not_there_are_refused(tmp_path):
    tensors, _ = gptq(4, "gptq", ordered=True)
    tensors[f"{MODULE}.g_idx"][5] = 3
    opened = mg.open(directory(tmp_path / "m", tensors, {"quant_method": "gptq"}))
    with pytest.raises(CheckpointError, match="names groups that are not among the 3"):
        opened.read(f"{MODULE}.weight")


def test_quantised_and_plain_models_merge(tmp_path):
    tensors, weight = gptq(4, "gptq", ordered=True)
    place = directory(tmp_path / "quantised", tensors, {"quant_method": "gptq", "bits": 4})
    plain = directory(tmp_path / "plain", {f"{MODULE}.weight": torch.randn(64, 96).half()})
    recipe = {"method": "linear", "models": [str(place), str(plain)]}
    merge = mg.recipes.prepare(mg.recipes.load(recipe))
    assert any("is quantised (1 tensors in GPTQ)" in note for note in merge.plan.notes)
    out = mg.run(recipe, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    expected = (weight.float() + mg.open(plain)[f"{MODULE}.weight"].float()) / 2
    assert torch.equal(mg.open(out)[f"{MODULE}.weight"], expected.half())


def test_a_quantised_model_is_saved_as_numbers(tmp_path):
    place = recorded("bitsandbytes-nf4-nested", tmp_path / "m")
    out = mg.save(place, tmp_path / "out", dtype="float32")
    expected = load_file(RECORDED / "expected.safetensors")["bitsandbytes-nf4-nested"]
    torch.testing.assert_close(load_file(out / "model.safetensors")[f"{MODULE}.weight"], expected, rtol=1e-6, atol=1e-7)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_an_adapter_is_merged_into_a_quantised_base(tmp_path):
    place = recorded("bitsandbytes-nf4", tmp_path / "m")
    lora = tmp_path / "lora"
    lora.mkdir()
    factors = {
        f"base_model.model.{MODULE}.lora_A.weight": torch.randn(2, 96),
        f"base_model.model.{MODULE}.lora_B.weight": torch.randn(64, 2),
    }
    save_file(factors, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    merged = mg.open(f"{place}+{lora}")[f"{MODULE}.weight"]
    a, b = factors.values()
    expected = load_file(RECORDED / "expected.safetensors")["bitsandbytes-nf4"] + b @ a
    torch.testing.assert_close(merged.float(), expected, rtol=1e-5, atol=1e-5)


def test_rows_are_decoded_some_at_a_time(monkeypatch):
    seen = []

    def decode(rows):
        seen.append(rows)
        return torch.zeros(rows[1] - rows[0], 10)

    monkeypatch.setattr(dequantising, "_CHUNK", 200)
    source = mg.open({"codes": torch.zeros(3)})
    view = Dequantised(source, {"w": (FORMATS[0], Codec((64, 10), ("codes",), decode))}, "bfloat16")
    assert view.read("w", (3, 50)).shape == (47, 10)
    assert seen == [(3, 23), (23, 43), (43, 50)]
    assert view.overhead("w", 100) < 100 * 4 + 200 * 64
