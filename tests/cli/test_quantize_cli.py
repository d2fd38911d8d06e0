"""`merganser merge --quantize`: the error of every layer, printed beside that of the first model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from merganser.cli import main
from support.small_gguf import CONFIG, LAYERS, llama


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    pytest.importorskip("transformers", reason="it knows which weights are Linear")
    for name, scale in (("a", 1.0), ("b", 0.5)):
        (tmp_path / name).mkdir()
        weights = {key: scale * torch.from_numpy(value) for key, value in llama().items()}
        save_file(weights, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "recipe.yml").write_text("method: linear\nmodels: [./a, ./b]\n")
    return tmp_path / "recipe.yml"


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr("sys.argv", ["merganser", *map(str, args)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_the_errors_are_printed(recipe, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "merge", recipe, tmp_path / "out", "--quantize", "fp8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(f"{7 * LAYERS} Linear weights are written in FP8" in line for line in lines)
    assert "tensors  21: linear × 21" in lines
    assert [line.split()[-1] for line in lines[:2]] == ["./a", "./b"]
    (heading,) = (n for n, line in enumerate(lines) if line.startswith("layer"))
    assert "of ./a alone" in lines[heading]
    rows = [line.split() for line in lines if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1"]
    assert all(0 < float(cell.rstrip("%")) < 4 for row in rows for cell in row[1:])
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype is torch.float32


def test_the_errors_are_an_event(recipe, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "merge", recipe, tmp_path / "out", "--quantize", "fp8", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (found,) = (event for event in events if event["event"] == "quantised")
    assert [set(layer) for layer in found["layers"]] == [{"layer", "merged", "alone"}] * LAYERS


def test_forms_that_cannot_be_written_end_the_command(recipe, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "plan", recipe, "--quantize", "Q4_K_M") == 2
    assert "Q4_K_M is a mixture of types that llama.cpp chooses" in capsys.readouterr().err
    assert run(monkeypatch, "merge", recipe, tmp_path / "out.safetensors", "--quantize", "fp8") == 0
    assert (tmp_path / "out.safetensors").is_file()
