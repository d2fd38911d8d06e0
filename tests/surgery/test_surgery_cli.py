"""The commands: what they write, and how they refuse."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

import merganser as mg
from merganser.cli import build
from merganser.errors import InputError


def run(*words):
    result = CliRunner().invoke(build(), [str(word) for word in words])
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]


def test_transplant_tokenizer(llama, tmp_path):
    model, donor, out = llama("model", "metaspace", 420), llama("donor"), tmp_path / "out"
    words = ["transplant-tokenizer", model, "--from", donor, out, "--terms", 4, "--json"]
    plan = run(*words, "--dry-run")[0]
    assert not out.exists()
    assert any("tokens; the other rows are computed by omp" in note for note in plan["notes"])
    assert run(*words)[-1]["path"] == str(out)
    assert run(*words, "--resume")[-1]["already_complete"]
    assert mg.open(out).spec("model.embed_tokens.weight") == mg.open(donor).spec("model.embed_tokens.weight")
    padded = tmp_path / "padded"
    run("transplant-tokenizer", model, "--from", donor, padded, "--pad-to-multiple-of", 64, "--json")
    rows = mg.open(donor).spec("model.embed_tokens.weight").shape[0]
    assert mg.open(padded).spec("model.embed_tokens.weight").shape[0] == rows + -rows % 64
    with pytest.raises(InputError, match="--absent|absent tokens"):
        run("transplant-tokenizer", model, "--from", donor, tmp_path / "no", "--absent", "guess")


def test_moe(llama, tmp_path):
    paths = [llama(name, seed=i) for i, name in enumerate(["base", "a", "b"])]
    experts = [{"source_model": path.name} for path in paths[1:]]
    file, out = tmp_path / "moe.yml", tmp_path / "out"
    file.write_text(yaml.safe_dump({"base_model": "base", "gate_mode": "singular", "experts": experts}))
    assert run("moe", file, out, "--json")[-1]["path"] == str(out)
    assert "model.layers.1.block_sparse_moe.experts.1.w2.weight" in mg.open(out)
    assert json.loads((out / "config.json").read_text())["num_local_experts"] == 2
    with pytest.raises(InputError, match="no such recipe file"):
        run("moe", tmp_path / "nowhere.yml", tmp_path / "no")


def test_an_output_that_exists_is_refused_before_any_work(llama, tmp_path, monkeypatch):
    def work(*_arguments, **_options):
        raise AssertionError("this is work")

    model, donor, out = llama("model"), llama("donor", seed=1), tmp_path / "out"
    (out / "mine").mkdir(parents=True)
    for module, name in (("mixtures", "moe"), ("transplants", "transplant"), ("expert_matching", "match_experts")):
        monkeypatch.setattr(f"merganser.surgery.{module}.{name}", work)
    for words in (
        ["moe", tmp_path / "moe.yml"],
        ["transplant-tokenizer", model, "--from", donor],
        ["match-experts", model, "--to", donor],
    ):
        with pytest.raises(InputError, match="overwrite"):
            run(*words, out)
