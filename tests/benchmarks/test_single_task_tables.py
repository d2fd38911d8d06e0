"""The pure parts of the single-task benchmark, on networks small enough to merge in a test."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from benchmarks.single_task import earlier, first_images, line, means, pair_cosines, table, unmoved
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
    rows = table(models, symmetry, batches, split, tries=2)
    assert list(rows) == [
        "plain mean",
        "match to the first",
        "match activations to the first",
        "MergeMany",
        "C²M³",
        "C²M³ on activations",
    ]
    for row in rows.values():
        assert 0.0 <= row["accuracy"] <= 1.0
        assert 0.0 <= row["repaired_accuracy"] <= 1.0
        assert row["cycle_error"] == 0.0
    assert rows["C²M³"]["objective"] >= rows["plain mean"]["objective"]
    assert "±" in line(3, "MergeMany", rows["MergeMany"])


def test_known_rows_are_not_measured_again(setting):
    models, symmetry, split = setting
    batches = [images for images, _ in split.batches(20)]
    known = {"MergeMany": {"accuracy": 2.0}}
    rows = table(models, symmetry, batches, split, tries=1, known=known)
    assert rows["MergeMany"] == known["MergeMany"]
    assert rows["C²M³"]["accuracy"] <= 1.0


def test_the_first_images_of_batches():
    batches = [torch.zeros(20, 1), torch.ones(20, 1), torch.ones(20, 1)]
    assert [len(batch) for batch in first_images(batches, 30)] == [20, 10]


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


def test_means_and_spread():
    runs = [{"accuracy": 0.2, "repaired_accuracy": 0.5}, {"accuracy": 0.4, "repaired_accuracy": 0.5}]
    assert means(runs) == pytest.approx(
        {"accuracy": 0.3, "repaired_accuracy": 0.5, "spread": 0.1, "repaired_spread": 0.0, "runs": 2}
    )
    assert means(runs[:1]) == {**runs[0], "runs": 1}


def test_a_stored_run_is_extended_only_if_it_is_the_same(tmp_path):
    path = tmp_path / "stored.json"
    assert earlier(path, {"repair": "one pass"}, [0.9]) == {}
    path.write_text(
        json.dumps({"results": {"single": [0.9, 0.8], "settings": {"repair": "one pass"}, "2": {"C²M³": {}}}})
    )
    assert earlier(path, {"repair": "one pass"}, [0.9, 0.8, 0.7]) == {"2": {"C²M³": {}}}
    assert earlier(path, {"repair": "layer by layer"}, [0.9, 0.8, 0.7]) == {}
    assert earlier(path, {"repair": "one pass"}, [0.9, 0.7]) == {}
