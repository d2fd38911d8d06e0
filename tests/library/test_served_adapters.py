"""What vLLM's loader refuses, by the limits it documents."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from merganser.cli.lora import show_report
from merganser.library import extract_lora
from merganser.library.served_adapters import vllm_objections, vllm_options

LINEAR = {
    "base_model.model.layers.0.q.lora_A.weight": torch.ones(4, 16),
    "base_model.model.layers.0.q.lora_B.weight": torch.ones(24, 4),
}


def adapter(directory, tensors=LINEAR, **config):
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q"], "bias": "none"} | config
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def test_updates_of_linear_layers_are_loaded(tmp_path):
    assert vllm_objections(adapter(tmp_path / "plain")) == []


@pytest.mark.parametrize(("rank", "most"), [(1, 1), (2, 8), (16, 16), (17, 32), (300, 320), (512, 512)])
def test_the_rank_that_a_server_must_allow_is_one_that_it_knows(tmp_path, rank, most):
    assert vllm_options(adapter(tmp_path / "plain", r=rank)) == f"--enable-lora --max-lora-rank {most}"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "LOHA"}, "of kind LOHA"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["score"]}, "modules_to_save"),
        ({"bias": "all"}, "bias: all"),
        ({"r": 513}, "rank is 513, and at most 512"),
        ({"rank_pattern": {"q": 2}}, "different ranks"),
    ],
)
def test_settings_that_it_does_not_know(tmp_path, config, said):
    (found,) = vllm_objections(adapter(tmp_path / "odd", **config))
    assert said in found


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("norm.weight", (16,), "whole weights, which low_rank_only leaves out"),
        ("embed.lora_embedding_A", (4, 50), "embeddings"),
        ("conv.lora_A.weight", (4, 3, 3, 3), "convolutions"),
    ],
)
def test_tensors_that_it_does_not_know(tmp_path, name, shape, said):
    (found,) = vllm_objections(adapter(tmp_path / "odd", LINEAR | {f"base_model.model.{name}": torch.ones(shape)}))
    assert repr(name) in found
    assert said in found


def test_extracted_adapters_say_how_vllm_loads_them(tmp_path, capsys):
    torch.manual_seed(0)
    base = {"model.layers.0.q.weight": torch.randn(24, 16), "model.norm.weight": torch.ones(16)}
    tuned = {name: tensor + 0.1 * torch.randn(tensor.shape) for name, tensor in base.items()}
    show_report(extract_lora(tuned, base, tmp_path / "adapter", rank=4, whole=False), as_json=False)
    assert "vLLM with --enable-lora --max-lora-rank 8" in capsys.readouterr().out
    show_report(extract_lora(tuned, base, tmp_path / "other", rank=4), as_json=True)
    assert "model.norm.weight" in json.loads(capsys.readouterr().out)["vllm_objections"][-1]
