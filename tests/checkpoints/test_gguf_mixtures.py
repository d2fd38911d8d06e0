"""GGUF files of mixtures of experts: against the weights they were written from, and transformers' reader of GGUF."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.checkpoints.gguf_config import gguf_config
from merganser.checkpoints.gguf_model import GGUFModel
from merganser.errors import CheckpointError
from support.small_gguf import EXPERTS, HEADS, HIDDEN, LAYERS, SHARED, WIDTH, mixture, write

gguf = pytest.importorskip("gguf")
KINDS = gguf.GGMLQuantizationType
FAMILIES = {"mixtral": "mixtral", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "olmoe": "olmoe"}
LOADING = ("missing_keys", "unexpected_keys", "mismatched_keys")


def config(architecture: str) -> dict:
    own = {"num_local_experts": EXPERTS} if architecture == "mixtral" else {"num_experts": EXPERTS}
    if architecture.startswith("qwen"):
        own |= {"moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH, "head_dim": HIDDEN // HEADS}
    return own | {
        "model_type": FAMILIES[architecture],
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": SHARED,
        "num_experts_per_tok": 2,
        "vocab_size": 32,
        "tie_word_embeddings": False,
    }


def directory(path, architecture: str, weights: dict[str, np.ndarray]):
    path.mkdir()
    save_file({name: torch.from_numpy(values) for name, values in weights.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config(architecture)))
    return path


@pytest.mark.parametrize("architecture", FAMILIES)
def test_experts_are_read_one_by_one(architecture, tmp_path):
    weights = mixture(architecture)
    opened = mg.open(write(tmp_path / "m.gguf", weights, architecture))
    assert isinstance(opened, GGUFModel)
    assert set(opened.names()) == set(weights)
    for name, values in weights.items():
        assert opened.spec(name).shape == values.shape, name
        assert np.array_equal(opened[name].numpy(), values), name
        assert np.array_equal(opened.read(name, (1, 3)).numpy(), values[1:3]), name


def test_older_files_have_a_tensor_for_each_expert(tmp_path):
    weights = mixture("mixtral")
    path = write(tmp_path / "m.gguf", weights, "mixtral")
    writer = gguf.GGUFWriter(str(tmp_path / "old.gguf"), "llama")
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(SHARED)
    writer.add_expert_count(EXPERTS)
    for tensor in gguf.GGUFReader(str(path)).tensors:
        parts = [tensor.data] if "_exps" not in tensor.name else tensor.data
        for expert, values in enumerate(parts):
            writer.add_tensor(tensor.name.replace("_exps", f".{expert}"), np.array(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = mg.open(tmp_path / "old.gguf")
    assert set(opened.names()) == set(weights)
    for name, values in weights.items():
        assert np.array_equal(opened[name].numpy(), values), name


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe"])
def test_transformers_reads_the_same(architecture, tmp_path):
    """By logits: transformers' own reader of the file against its model with the weights that are read here."""
    transformers = pytest.importorskip("transformers")
    path = write(tmp_path / "m.gguf", mixture(architecture), architecture, kind=KINDS.Q8_0)
    settings = transformers.AutoConfig.for_model(**config(architecture), norm_topk_prob=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, config=settings
    )
    opened = mg.open(path)
    merged = mg.run({"method": "passthrough", "models": [str(path)], "output": {"dtype": "float32"}}, tmp_path / "out")
    ours, info = transformers.AutoModelForCausalLM.from_pretrained(
        merged, config=settings, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in LOADING)
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert opened.spec("model.norm.weight").element.name == "bfloat16"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_config_is_made_of_the_settings(architecture, tmp_path):
    transformers = pytest.importorskip("transformers")
    path = write(tmp_path / "m.gguf", mixture(architecture), architecture)
    made = gguf_config(mg.open(path))
    assert made["model_type"] == FAMILIES[architecture]
    out = mg.run({"method": "linear", "models": [str(path), str(path)]}, tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == made["architectures"][0]
    assert not any(info[key] for key in LOADING)
    assert model.config.rope_parameters["rope_theta"] == 10000  # llama.cpp's, which files need not name
    assert torch.isfinite(model(torch.arange(5)[None]).logits).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_gguf_mixture_merges_with_one_in_safetensors(architecture, fused, tmp_path):
    """Experts in safetensors are stored one by one, or as transformers' modules hold them."""
    transformers = pytest.importorskip("transformers")
    mine, theirs = mixture(architecture, seed=1), mixture(architecture)
    other = directory(tmp_path / "hf", architecture, mine)
    path = write(tmp_path / "m.gguf", theirs, architecture)
    if fused:
        model = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, other / "model.safetensors")
    out = mg.run({"method": "linear", "models": [str(other), str(path)], "parameters": {"weight": 0.5}}, tmp_path / "o")
    expected = {name: (torch.from_numpy(mine[name]) + torch.from_numpy(theirs[name])) / 2 for name in mine}
    exact = transformers.AutoModelForCausalLM.from_pretrained(
        directory(tmp_path / "exact", architecture, {k: v.numpy() for k, v in expected.items()}), dtype=torch.float32
    )
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in LOADING)
    for name, values in exact.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_gguf_mixture_is_written_as_stacks(architecture, tmp_path):
    mine, theirs = mixture(architecture, seed=1), mixture(architecture)
    path = write(tmp_path / "m.gguf", theirs, architecture)
    other = directory(tmp_path / "hf", architecture, mine)
    document = {"method": "linear", "models": [str(other), str(path)], "output": {"quantize": "q8_0"}}
    merges = []
    out = mg.run(document, tmp_path / "out.gguf", on_merge=merges.append)
    given, made = (gguf.GGUFReader(str(each)) for each in (path, out))
    assert {t.name: tuple(t.shape) for t in made.tensors} == {t.name: tuple(t.shape) for t in given.tensors}
    assert {t.tensor_type.name for t in made.tensors if len(t.shape) == 3} == {"Q8_0"}
    back = mg.open(out)
    for name in mine:
        exact = torch.from_numpy(mine[name] + theirs[name]) / 2
        assert (back[name] - exact).norm() <= 0.01 * exact.norm(), name
    errors = merges[0].sources[0].errors()
    assert [error.layer for error in errors] == ["rest", "0", "1"]
    assert all(0.003 < error.merged < 0.01 and 0.003 < error.alone < 0.01 for error in errors)
    if architecture == "qwen2moe":
        transformers = pytest.importorskip("transformers")
        settings = transformers.AutoConfig.for_model(**config(architecture))
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", config=settings)
        assert torch.isfinite(model(torch.arange(5)[None]).logits).all()


def test_a_part_of_a_split_file_is_refused(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m-00001-of-00003.gguf"), "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("w", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="one of 3 parts of a model; join them with `llama-gguf-split`"):
        mg.open(tmp_path / "m-00001-of-00003.gguf")
