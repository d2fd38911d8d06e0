"""Checkpoints that consist of headers: a plan may look at them, and reading a weight fails the test."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from merganser.checkpoints.base import Checkpoint, TensorSpec


class Header(Checkpoint):
    def __init__(self, label, specs, aliases=None, directory=None) -> None:
        self.label = label
        self.directory = directory
        self._specs = specs
        self._aliases = aliases or {}

    def names(self) -> Sequence[str]:
        return list(self._specs)

    def spec(self, name: str) -> TensorSpec:
        return self._specs[self._aliases.get(name, name)]

    def read(self, name, rows=None):
        raise AssertionError(f"planning read {name}")

    def aliases(self) -> Mapping[str, str]:
        return self._aliases


def llama(layers: int = 4, hidden: int = 8, vocabulary: int = 32, dtype=torch.float32, head: bool = True):
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            shapes[f"model.layers.{i}.{part}.weight"] = (hidden, hidden)
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if head:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}


@pytest.fixture
def header():
    return Header


@pytest.fixture
def make_llama():
    return llama


@pytest.fixture
def hub() -> Callable[..., Callable[[str], Header]]:
    """`hub(layers=40, special={...})`: opens any reference as a stand-in of that shape."""

    def build(special: Mapping[str, Mapping[str, TensorSpec]] | None = None, **shape):
        return lambda reference: Header(reference, (special or {}).get(reference) or llama(**shape))

    return build


@pytest.fixture
def directory(tmp_path: Path):
    """`directory("a", specs, config={...}, seed=0)`: a small model on disk."""

    def build(name, specs=None, config=None, seed=0, files=None) -> Path:
        generator = torch.Generator().manual_seed(seed)
        path = tmp_path / name
        path.mkdir()
        tensors = {
            n: torch.randn(s.shape, generator=generator).to(s.dtype)
            if s.dtype.is_floating_point
            else torch.arange(s.numel).reshape(s.shape).to(s.dtype)
            for n, s in (specs or llama()).items()
        }
        save_file(tensors, path / "model.safetensors")
        if config is not None:
            (path / "config.json").write_text(json.dumps(config))
        for file, content in (files or {}).items():
            (path / file).write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return build
