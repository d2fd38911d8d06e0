"""The same merge in the words of several programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import merganser as mg
from benchmarks.measuring import Run
from benchmarks.peers import BASE, CASES, CLASSIFIER, FUSIONBENCH, MERGANSER, MERGEKIT, Bench, Judge, as_classifier
from merganser import recipes

ENCODER = {"encoder.w": torch.randn(6, 4), "encoder.b": torch.randn(6), "pooler.dense.weight": torch.randn(2, 2)}


@pytest.fixture
def bench(checkpoint, tmp_path):
    encoders = {
        name: Path(checkpoint(name, {key: value + shift for key, value in ENCODER.items()}))
        for shift, name in enumerate((BASE, "one", "two"))
    }
    for path in encoders.values():
        (path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    classifiers = {name: as_classifier(path, tmp_path / "classifiers" / name) for name, path in encoders.items()}
    return Bench(encoders, classifiers, {MERGEKIT: Path("mk"), FUSIONBENCH: Path("fb")}, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_our_words_are_a_recipe(bench, name):
    command, document = bench.job(MERGANSER, CASES[name], 3)
    assert command[1:] == ["-m", "merganser", "merge"]
    assert document["seed"] == 3
    assert len(recipes.plan(recipes.load(document)).outputs) == len(ENCODER)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.mergekit is not None])
def test_mergekit_is_told_the_same(bench, name):
    """Its recipe, run by us, gives what ours gives: the dialects agree on what the parameters mean."""
    case = CASES[name]
    _, ours = bench.job(MERGANSER, case, 0)
    _, theirs = bench.job(MERGEKIT, case, 0)
    made = mg.open(mg.run(ours, bench.workdir / "ours")).state_dict()
    other = mg.open(mg.run(theirs, bench.workdir / "theirs")).state_dict()
    if case.draws:  # the draws are keyed by the tensors' names, which differ
        assert made.keys() - ENCODER.keys() == set()
        return
    for key in ("encoder.w", "encoder.b"):
        assert torch.allclose(made[key], other[f"bert.{key}"], atol=1e-6)


def test_every_case_has_a_peer_and_every_peer_a_case(bench):
    words = {name: [p for p in bench.programs if bench.job(p, case, 0) is not None] for name, case in CASES.items()}
    assert all(len(programs) > 1 and programs[0] == MERGANSER for programs in words.values())
    assert {program for programs in words.values() for program in programs} == {MERGANSER, MERGEKIT, FUSIONBENCH}
    command, job = bench.job(FUSIONBENCH, CASES["TSV-M"], 0)
    assert command[0] == "fb/python"
    assert list(job["models"]) == [BASE, "one", "two"]


def test_classifiers_hold_the_encoder(bench):
    found = load_file(bench.classifiers["one"] / "model.safetensors")
    assert set(found) == {"bert.encoder.w", "bert.encoder.b", *CLASSIFIER}
    assert torch.equal(found["bert.encoder.w"], ENCODER["encoder.w"] + 1)


class Scored:
    """Experts whose score is a number in the weights."""

    def __init__(self):
        self.base = {"w": torch.zeros(2)}

    def scores(self, weights, names):
        return dict.fromkeys(names, float(weights["w"][0]))


def test_rows():
    judge = Judge(Scored(), {"one": 0.5, "two": 1.0})
    ours, theirs = {"w": torch.tensor([0.5, 0.0])}, {"w": torch.tensor([0.5, 0.25])}
    row = judge.row([theirs], [Run(2.0, 1.0, 7)], ours)
    assert row["normalised"] == pytest.approx(0.75)
    assert row["difference"] == pytest.approx(0.5)
    assert "spread" not in row
    two = judge.row([ours, {"w": torch.tensor([0.25, 0.0])}], [Run(2.0, 1.0, 7), Run(4.0, 3.0, 5)], None)
    assert two["seeds"] == [0, 1]
    assert two["spread"] == pytest.approx(0.375 / 2**0.5)
    assert (two["seconds"], two["peak_anonymous"], two["difference"]) == (3.0, 7, None)
