"""The pure parts of the single-task benchmark, on networks small enough to merge in a test."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.answers import unpack
from benchmarks.single_task import earlier, line, means, pair_cosines, unmoved, ways
from benchmarks.zoo.architectures import MLP
from benchmarks.zoo.images import Split
from merganser import align
from merganser.align.state import average, state_of


@pytest.fixture(scope="module")
def setting():
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(MLP(16, 4, (8, 8)).eval())
    images = torch.randint(0, 256, (40, 4, 4, 1), dtype=torch.uint8)
    split = Split(images, torch.randint(0, 4, (40,)), torch.tensor([0.5]), torch.tensor([0.3]))
    return models, align.symmetry(models[0], torch.randn(2, 16)), split


def test_unmoved_models_merge_to_their_plain_mean(setting):
    models, symmetry, _ = setting
    found = unmoved(models, symmetry)
    expected = average([state_of(model) for model in models])
    for name, tensor in found.merged().items():
        assert torch.equal(tensor, expected[name])
    assert found.cycle_error() == 0.0


def test_every_way_is_scored(setting):
    models, symmetry, split = setting
    batches = [images for images, _ in split.batches(20)]
    rows = {way: measure() for way, measure in ways(models, symmetry, batches, batches[:1], split, tries=2).items()}
    assert list(rows) == [
        "plain mean",
        "match to the first",
        "match activations to the first",
        "MergeMany",
        "MergeMany by Frank-Wolfe",
        "C²M³",
        "C²M³ on activations",
    ]
    for row in rows.values():
        assert 0.0 <= row["accuracy"] <= 1.0
        assert row["cycle_error"] == 0.0
        right = [unpack(bits, len(split)).mean() for bits in row["repaired_right"]]
        assert len(right) == row.get("runs", 1)
        assert row["repaired_accuracy"] == pytest.approx(np.mean(right))
    assert rows["C²M³"]["objective"] >= rows["plain mean"]["objective"]
    assert "±" in line(3, "MergeMany", rows["MergeMany"])


def test_matching_a_permuted_copy_raises_the_cosine_to_one(setting):
    models, symmetry, _ = setting
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    other = copy.deepcopy(models[0])
    with torch.no_grad():
        first, second = other.layers
        first.weight.copy_(first.weight[order])
        first.bias.copy_(first.bias[order])
        second.weight.copy_(second.weight[:, order])
    found = pair_cosines([models[0], other], symmetry)
    assert found["before"] < 0.9
    assert found["after"] == pytest.approx(1, abs=1e-5)


def test_scales_of_norms_do_not_make_networks_alike():
    networks = []
    for seed in range(2):
        torch.manual_seed(seed)
        networks.append(nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4)).eval())
    assert abs(pair_cosines(networks, align.symmetry(networks[0], torch.randn(2, 16)))["before"]) < 0.2


def test_means_and_spread():
    runs = [
        {"accuracy": 0.2, "repaired_accuracy": 0.5, "repaired_right": ["0f"]},
        {"accuracy": 0.4, "repaired_accuracy": 0.5, "repaired_right": ["f0"]},
    ]
    found = means(runs)
    assert found.pop("repaired_right") == ["0f", "f0"]
    assert found == pytest.approx(
        {"accuracy": 0.3, "repaired_accuracy": 0.5, "spread": 0.1, "repaired_spread": 0.0, "runs": 2}
    )
    assert means(runs[:1]) == {**runs[0], "runs": 1}


def test_a_stored_run_is_extended_only_if_it_is_the_same(tmp_path):
    path = tmp_path / "stored.json"
    assert earlier(path, {"repair": "one pass"}, [0.9]) == {}
    stored = {"single": [0.9, 0.8], "settings": {"repair": "one pass"}, "2": {"C²M³": {}}}
    path.write_text(json.dumps({"results": stored}))
    assert earlier(path, {"repair": "one pass"}, [0.9, 0.8, 0.7]) == stored
    assert earlier(path, {"repair": "layer by layer"}, [0.9, 0.8, 0.7]) == {}
    assert earlier(path, {"repair": "one pass"}, [0.9, 0.7]) == {}
