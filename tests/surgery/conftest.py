"""Tiny Llamas with tokenizers of every kind."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

TEXT = (
    "The quick brown fox jumps over the lazy dog; a café is where the dogs and foxes meet.\n"
    "Merging models is not magic: weights are averaged, and what they know is shared.\n"
    "Once upon a time there was a little girl who loved to play outside in the sunshine.\n"
)


def build_tokenizer(kind: str, size: int):
    """A tokenizer trained on the text: byte_level, metaspace (BPE with bytes), unigram or wordpiece."""
    tokenizers = importlib.import_module("tokenizers")
    models, pre, trainers, decoders = (
        importlib.import_module(f"tokenizers.{name}") for name in ("models", "pre_tokenizers", "trainers", "decoders")
    )
    special = ["[UNK]", "[CLS]", "[SEP]"] if kind == "wordpiece" else ["<unk>", "<s>", "</s>"]
    if kind == "byte_level":
        special = ["<|end|>"]
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    elif kind == "metaspace":
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre.Metaspace(), decoders.Metaspace()
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special)
    elif kind == "unigram":
        tokenizer = tokenizers.Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token="<unk>")
    else:
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    data = json.loads(tokenizer.to_str())
    if kind == "metaspace":  # bytes are ordinary tokens, only known to the trainer as special ones
        data["added_tokens"] = [record for record in data["added_tokens"] if not record["content"].startswith("<0x")]
    roles = {
        "byte_level": {"bos_token": "<|end|>", "eos_token": "<|end|>"},
        "wordpiece": {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
    }
    return data, roles.get(kind, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"})


def llama_shapes(rows: int, hidden: int, tied: bool, layers: int = 2, wide: int = 16) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (wide, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, wide)
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return shapes if tied else shapes | {"lm_head.weight": (rows, hidden)}


@pytest.fixture
def llama(checkpoint) -> Callable[..., Path]:
    """`llama("a", kind="byte_level")`: a small Llama with a tokenizer on disk; `edits` change its config."""

    def build(name, kind="byte_level", size=400, hidden=8, tied=True, seed=0, template=None, pad=0, **edits) -> Path:
        tokenizer, settings = build_tokenizer(kind, size)
        vocabulary = tokenizer["model"]["vocab"]
        rows = len(vocabulary) + pad
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            n: torch.ones(s) if "norm" in n else 0.3 * torch.randn(s, generator=generator)
            for n, s in llama_shapes(rows, hidden, tied).items()
        }
        ids = {record["content"]: record["id"] for record in tokenizer["added_tokens"]}
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "vocab_size": rows,
            "tie_word_embeddings": tied,
            "torch_dtype": "float32",
            **{f"{role.removesuffix('_token')}_token_id": ids[token] for role, token in settings.items()},
        } | edits
        path = checkpoint(name, tensors, json.dumps(config))
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        (path / "tokenizer_config.json").write_text(
            json.dumps(
                {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
                | ({"chat_template": template} if template else {})
            )
        )
        numbers = {key: value for key, value in config.items() if key.endswith("_token_id")}
        (path / "generation_config.json").write_text(json.dumps(numbers | {"temperature": 0.7}))
        return path

    return build
