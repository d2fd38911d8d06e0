"""Small checkpoints, a base and experts of it, for tests of the expert library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

SHAPES = {"a.weight": (48, 32), "b.weight": (40, 96), "c.weight": (6, 5), "norm.weight": (32,), "bias": (48,)}


def base_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in SHAPES.items()}
    return tensors | {"frozen.weight": torch.randn(20, 20, generator=rng).to(dtype), "steps": torch.tensor([3])}


def expert_tensors(base: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    changed = {}
    for name in SHAPES:
        delta = 0.1 * torch.randn(base[name].shape, generator=rng)
        if delta.dim() == 2:
            delta = delta * torch.linspace(1, 0.01, delta.shape[1])
        changed[name] = (base[name].float() + delta).to(base[name].dtype)
    return {**base, **changed}


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    """The directories of the base and of three experts."""
    base = base_tensors()
    states = {"base": base} | {
        name: expert_tensors(base, seed) for seed, name in enumerate(("math", "code", "chat"), start=1)
    }
    for name, tensors in states.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"model_type": "test"}')
    return {name: tmp_path / name for name in states}


def experts(models: Mapping[str, Path]) -> dict[str, Path]:
    return {name: path for name, path in models.items() if name != "base"}
