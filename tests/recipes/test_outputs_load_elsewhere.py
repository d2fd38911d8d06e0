"""Merged directories load in the libraries that wrote their inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import merganser as mg


def averages(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], merged: dict[str, torch.Tensor]) -> bool:
    assert list(first) == list(merged)
    return all(
        torch.allclose((first[name] + second[name]) / 2, merged[name], atol=1e-6)
        for name, value in first.items()
        if value.is_floating_point()
    )


def test_sentence_transformers_with_a_dense_layer(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    for name in ("one", "two"):
        transformers.BertModel(config).save_pretrained(tmp_path / "bert" / name)
        tokenizer.save_pretrained(tmp_path / "bert" / name)
        encoder = models.Transformer(str(tmp_path / "bert" / name), max_seq_length=8)
        layers = [encoder, models.Pooling(16), models.Dense(16, 8)]
        library.SentenceTransformer(modules=layers, device="cpu").save(str(tmp_path / name))
    mg.run({"method": "linear", "models": [str(tmp_path / "one"), str(tmp_path / "two")]}, tmp_path / "out")
    one, two, out = (library.SentenceTransformer(str(tmp_path / name), device="cpu") for name in ("one", "two", "out"))
    assert [type(layer).__name__ for layer in out] == ["Transformer", "Pooling", "Dense"]
    assert averages(one.state_dict(), two.state_dict(), out.state_dict())
    assert out.encode(["hello world"]).shape == (1, 8)


def test_a_component_of_a_diffusers_pipeline(tmp_path: Path) -> None:
    network = pytest.importorskip("diffusers").UNet2DModel
    for name in ("one", "two"):
        network(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
        ).save_pretrained(tmp_path / name)
    mg.run({"method": "linear", "models": [str(tmp_path / "one"), str(tmp_path / "two")]}, tmp_path / "out")
    one, two, out = (network.from_pretrained(tmp_path / name) for name in ("one", "two", "out"))
    assert averages(one.state_dict(), two.state_dict(), out.state_dict())
    assert out(torch.zeros(1, 1, 8, 8), 1).sample.shape == (1, 1, 8, 8)
