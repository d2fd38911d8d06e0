"""Adapters over a base whose embedding is its head: what is written gives PEFT's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import merganser as mg
from merganser.checkpoints.adapter import Adapted
from merganser.checkpoints.adapter_file import AdapterFile
from merganser.errors import CheckpointError
from support.llamas import transformers  # noqa: F401

peft = pytest.importorskip("peft")
TOKENS = torch.arange(8)[None]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def base(tmp_path: Path, transformers: Any) -> Path:  # noqa: F811
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def train(base: Path, out: Path, transformers: Any, rows: int | None = None, **options: Any) -> torch.Tensor:  # noqa: F811
    """Write an adapter with random weights; the logits of the model that PEFT makes of it."""
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    settings = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings | options)).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
        adapted.save_pretrained(out)
        return adapted(TOKENS).logits


WAYS = {
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "kept tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "low-rank embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "low-rank head": {"target_modules": ["q_proj", "lm_head"]},
    "low-rank both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "tokens": {"trainable_token_indices": [1, 30]},
    "neither": {},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("rows", [None, 40])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_has_pefts_logits(tmp_path: Path, base: Path, transformers: Any, way: str, rows: Any) -> None:  # noqa: F811
    expected = train(base, tmp_path / "adapter", transformers, rows, **WAYS[way])
    out = mg.save(f"{base}+{tmp_path / 'adapter'}", tmp_path / "out")
    tied = way in ("neither", "kept tied", "tokens")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is tied
    assert (HEAD in load_file(out / "model.safetensors")) is not tied
    written = transformers.LlamaForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        assert torch.allclose(written(TOKENS).logits, expected, atol=1e-4)


def test_a_head_that_repeats_the_embedding_is_no_other(tmp_path: Path, base: Path, transformers: Any) -> None:  # noqa: F811
    weights = load_file(base / "model.safetensors")
    save_file(weights | {HEAD: weights[EMBEDDING].clone()}, base / "model.safetensors", {"format": "pt"})
    expected = train(base, tmp_path / "adapter", transformers, modules_to_save=["embed_tokens"])
    out = mg.save(f"{base}+{tmp_path / 'adapter'}", tmp_path / "out")
    with torch.no_grad():
        found = transformers.LlamaForCausalLM.from_pretrained(out).eval()(TOKENS).logits
    assert torch.allclose(found, expected, atol=1e-4)


def test_models_with_and_without_a_head_of_their_own(tmp_path: Path, base: Path, transformers: Any) -> None:  # noqa: F811
    train(base, tmp_path / "adapter", transformers, modules_to_save=["lm_head"])
    adapted = f"{base}+{tmp_path / 'adapter'}"
    halfway = (mg.open(adapted).read(HEAD) + mg.open(base).read(EMBEDDING)) / 2
    for number, models in enumerate(([str(base), adapted], [adapted, str(base)])):
        out = mg.run({"method": "linear", "models": models}, tmp_path / str(number))
        assert torch.allclose(mg.open(out)[HEAD], halfway, atol=1e-6)
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_heads_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    embedding = torch.randn(6, 4)
    for name, config in (
        ("bert.embeddings.word_embeddings", {"architectures": ["BertForMaskedLM"]}),
        ("shared", {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}),
    ):
        place = tmp_path / name
        (place / "adapter").mkdir(parents=True)
        save_file({f"{name}.weight": embedding}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config))
        save_file({f"base_model.model.{name}.weight": embedding + 1}, place / "adapter" / "adapter_model.safetensors")
        settings = {"modules_to_save": [name.rpartition(".")[2]]}
        (place / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
        with pytest.raises(CheckpointError, match="also uses as its head; .* merge the adapter with peft first"):
            mg.open(f"{place}+{place / 'adapter'}")


def test_names_tied_in_memory_become_two(tmp_path: Path) -> None:
    shared = torch.randn(5, 3)
    save_file({"base_model.model.head.weight": shared + 1}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"modules_to_save": ["head"]}))
    tied = mg.open({"embed.weight": shared, "head.weight": shared})
    opened = Adapted(tied, AdapterFile(tmp_path))
    assert opened.aliases() == {}
    assert torch.equal(opened.read("embed.weight"), shared)
    assert torch.equal(opened.read("head.weight"), shared + 1)
