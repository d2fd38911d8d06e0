"""Lock files of outputs that are quantised as they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from support.small_gguf import CONFIG, llama, write


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


def test_gguf(pair: Path) -> None:
    gguf = pytest.importorskip("gguf")
    write(pair / "a.gguf", llama(), kind=gguf.GGMLQuantizationType.Q8_0)
    out = mg.run({"method": "linear", "models": ["a.gguf", "b"]}, "out", quantize="q4_0")
    found = mg.origin.verify(out)
    assert (found.problems, found.bytes) == ((), sum(len(each) for each in stored(out / "model.gguf").values()))
    assert mg.origin.rebuild(out).problems == ()
    assert "model.gguf" in mg.origin.push(out, "my-org/merged", dry_run=True).files
    content = (out / "model.gguf").read_bytes()
    (out / "model.gguf").write_bytes(content.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"))
    assert any("header has changed" in problem for problem in mg.origin.verify(out).problems)
    (out / "model.gguf").write_bytes(content[:-40] + bytes(40))
    assert any("has changed: sha256" in problem for problem in mg.origin.verify(out).problems)
    assert any("differs in" in problem for problem in mg.origin.rebuild(out).problems)
    (out / "model.gguf").unlink()
    assert mg.origin.verify(out).problems == ("model.gguf is missing",)


def stored(file: Path) -> dict[str, bytes]:
    import gguf

    return {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_one_or_many_files_of_gguf(pair: Path, out: str) -> None:
    pytest.importorskip("gguf")
    write(pair / "base.gguf", llama())
    recipe = {"method": "linear", "models": ["a", "b", "base.gguf"], "output": {"quantize": "q8_0"}}
    place = mg.run(recipe, out)
    assert mg.origin.verify(place).problems == ()
    assert mg.origin.rebuild(place).problems == ()
    file = place if place.is_file() else place / "model.gguf"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (problem,) = mg.origin.verify(place).problems
    assert "has changed" in problem
