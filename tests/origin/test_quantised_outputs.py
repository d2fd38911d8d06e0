"""Lock files of outputs that are quantised as they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from support.small_gguf import CONFIG, llama


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for seed, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        draw = torch.Generator().manual_seed(seed)
        tensors = {key: torch.from_numpy(each).float() for key, each in llama().items()}
        moved = {
            key: (each + 0.1 * torch.randn(each.shape, generator=draw)).bfloat16() for key, each in tensors.items()
        }
        save_file(moved, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fp8(pair: Path) -> None:
    out = mg.run({"method": "linear", "models": ["a", "b"]}, "out", quantize="fp8")
    lock = mg.origin.read_lock(out)
    assert [model.label for model in lock.models] == ["a", "b"]
    assert mg.origin.verify(out).problems == ()
    assert mg.origin.rebuild(out).problems == ()
