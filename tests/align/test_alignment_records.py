"""Alignments on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from align_networks import mlp
from safetensors.numpy import save_file
from torch import nn

from merganser.align import Universe, symmetry, universe
from merganser.align.ascent import Step
from merganser.align.permutations import random
from merganser.align.records import Record
from merganser.errors import CheckpointError


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    _, known = mlp(5, 8, 3)
    pair = (random(known, 1), random(known, 2))
    record = Record(known, ("one", "two"), pair, 3.5, (Step("start", 1.0), Step("polish", 3.5)))
    record.save(tmp_path / "p.safetensors")
    again = Record.load(tmp_path / "p.safetensors")
    assert (again.symmetry, again.models, again.objective, again.trace) == (known, ("one", "two"), 3.5, record.trace)
    for ours, theirs in zip(record.permutations, again.permutations, strict=True):
        assert all(np.array_equal(ours[name], theirs[name]) and theirs[name].dtype == np.int64 for name in ours)


def test_a_universe_without_freedom_knows_its_models(tmp_path: Path) -> None:
    nets = [nn.Linear(4, 3) for _ in range(3)]
    universe(nets, symmetry(nets[0], torch.zeros(2, 4))).save(tmp_path / "p.safetensors")
    assert len(Universe.load(tmp_path / "p.safetensors", nets)) == 3


def test_bad_files(tmp_path: Path) -> None:
    _, known = mlp(5, 8, 3)
    (tmp_path / "junk").write_bytes(b"junk")
    for name in ("junk", "absent"):
        with pytest.raises(CheckpointError, match=f"cannot read permutations from .*{name}"):
            Record.load(tmp_path / name)
    with pytest.raises(CheckpointError, match="cannot write permutations to .*absent"):
        Record(known, ("one",), (random(known, 1),), 1.0).save(tmp_path / "absent/p.safetensors")
    save_file({"a": np.zeros(2)}, tmp_path / "weights")
    with pytest.raises(CheckpointError, match="no symmetry in its header"):
        Record.load(tmp_path / "weights")
    good = {"symmetry": known.to_json(), "universe": json.dumps({"models": ["one"], "objective": 1.0, "trace": []})}
    for arrays, header, message in (
        ({}, good | {"symmetry": "{}"}, "not the JSON of a symmetry"),
        ({}, good | {"universe": "[]"}, "not the permutations"),
        ({}, good | {"universe": "{}"}, "not the permutations"),
        ({}, good | {"universe": '{"models": 1, "objective": 1.0, "trace": []}'}, "not the permutations"),
        ({}, good, "no permutation for atom"),
        ({"7/0": np.arange(8)}, good, "model 7, of 1 models"),
        ({"0": np.arange(8)}, good, "not the permutations"),
    ):
        save_file(arrays, tmp_path / "bad", header)
        with pytest.raises(CheckpointError, match=message):
            Record.load(tmp_path / "bad")
