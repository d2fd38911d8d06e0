"""What a merge notes of its changes is what numpy finds in the weights, and the same after an interruption."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine import changes, fused
from merganser.engine.changes import FILE, read_changes
from merganser.engine.writer import CheckpointWriter
from merganser.kernels import tiles
from merganser.kernels.recording import fill_in

SHAPES = {"layers.0.big": (96, 1024), "layers.0.small": (7, 5), "layers.1.norm": (33,), "scale": ()}


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A base and two models on disk, relative to the working directory."""
    numbers = np.random.default_rng(0)
    base = {name: numbers.standard_normal(shape) for name, shape in SHAPES.items()}
    found = {}
    for label in ("base", "a", "b"):
        drift = 0.0 if label == "base" else 0.1
        found[label] = {
            name: torch.tensor(value + drift * numbers.standard_normal(np.shape(value))).float()
            for name, value in base.items()
        }
        found[label]["steps"] = torch.tensor([3])
        (tmp_path / label).mkdir()
        save_file(found[label], tmp_path / label / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("merganser.engine.comparison.LEAST", 0)
    return found


def recipe(method, **document):
    return {"method": method, "base": "./base", "models": ["./a", "./b"], **document}


def flat(tensor):
    return tensor.double().numpy().reshape(-1)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "tsv", "linear"])
def test_the_numbers_are_those_of_numpy(models, method, compiled, monkeypatch):
    monkeypatch.setattr(changes, "RUNS", 1)  # everything is looked at
    monkeypatch.setattr("merganser.engine.fused.RUNS", 1)
    if not compiled:
        monkeypatch.setattr(tiles, "library", lambda: None)
    document = recipe(method)
    if method == "linear":
        del document["base"]
    mg.run(document, "out")
    merged, noted = mg.open("out"), read_changes(mg.open("out").directory)
    for name in SHAPES:
        change = noted.tensors[name]
        base, a, b = (flat(models[label][name]) for label in ("base", "a", "b"))
        made = flat(merged.read(name))
        reference = a if method == "linear" else base
        assert [noted.labels[parent].strip("./") for parent in change.parents] == ["a", "b"]
        assert (change.method, change.entries, change.looked_at) == (method, made.size, made.size)
        expected = [np.linalg.norm(v) for v in (reference, made, made - a, made - b)]
        np.testing.assert_allclose([change.before, change.after, *change.to_parents], expected, rtol=1e-4, atol=1e-5)
        if method == "linear":
            assert change.to_base is None
            np.testing.assert_allclose(change.shares, [0.5, 0.5], atol=1e-4)
            continue
        np.testing.assert_allclose(change.to_base, np.linalg.norm(made - base), rtol=1e-4, atol=1e-5)
        moves = np.stack([a - base, b - base])
        assert change.conflicts == pytest.approx(np.mean((moves.max(0) > 0) & (moves.min(0) < 0)), abs=1e-6)
        if made.size > 1:
            shares = np.linalg.lstsq(moves.T, made - base, rcond=None)[0]
            np.testing.assert_allclose(change.shares, shares, atol=1e-3)
    assert noted.tensors["steps"].method == "copied"


def test_a_sample_tells_nearly_as_much(models):
    mg.run(recipe("task_arithmetic", parameters={"weight": 0.3}), "out")
    change = read_changes(mg.open("out").directory).tensors["layers.0.big"]
    assert 0 < change.looked_at < change.entries
    made, base = flat(mg.open("out").read("layers.0.big")), flat(models["base"]["layers.0.big"])
    assert change.to_base == pytest.approx(np.linalg.norm(made - base), rel=0.1)
    np.testing.assert_allclose(change.shares, [0.3, 0.3], atol=1e-4)


def test_workers_and_interruptions_change_nothing(models, monkeypatch):
    mg.run(recipe("ties"), "one", workers=1)
    mg.run(recipe("ties"), "two", workers=2)
    finished = []

    def fail(self, output, done, count=CheckpointWriter.finished_elsewhere):
        count(self, output, done)
        self.commit()
        finished.append(output.name)
        if len(finished) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "finished_elsewhere", fail)
        with pytest.raises(KeyboardInterrupt):
            mg.run(recipe("ties"), "three", workers=1)
    mg.run(recipe("ties"), "three", resume=True)
    one, two, three = (Path(out, FILE).read_bytes() for out in ("one", "two", "three"))
    assert one == two == three


def test_nothing_is_written_unless_something_was_merged_and_it_was_asked_for(models, tmp_path):
    mg.run(recipe("ties"), "quiet", changes=False)
    mg.save("a", "copy")
    assert read_changes(tmp_path / "quiet") is None
    assert read_changes(tmp_path / "copy") is None


def test_small_tensors_are_only_listed(models, tmp_path, monkeypatch):
    monkeypatch.setattr("merganser.engine.comparison.LEAST", changes.LEAST)
    mg.run(recipe("ties"), "out")
    noted = read_changes(tmp_path / "out").tensors
    assert {name for name, change in noted.items() if change.looked_at} == {"layers.0.big"}
    assert noted["layers.0.small"].method == "ties"


def test_what_is_not_finite_is_left_out(models, tmp_path):
    models["a"]["layers.0.small"][0, 0] = float("nan")
    save_file(models["a"], tmp_path / "a" / "model.safetensors")
    mg.run(recipe("task_arithmetic"), "out", allow_nan=True)
    noted = read_changes(tmp_path / "out")
    assert noted.tensors["layers.0.small"].looked_at == 0
    assert noted.tensors["layers.0.big"].looked_at > 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c.update(version=1),
        lambda c: c.update(labels="ab"),
        lambda c: c.pop("tensors"),
        lambda c: c["tensors"].update(w=[1]),
        lambda c: c["tensors"]["w"].__setitem__(2, [9]),
        lambda c: c["tensors"]["w"].__setitem__(3, 1),
        lambda c: c["tensors"]["w"].__setitem__(4, "x"),
        lambda c: c["tensors"]["w"][4].pop(),
        lambda c: c["tensors"]["w"][4].__setitem__(0, 0),
    ],
)
def test_a_damaged_file_is_an_error_that_says_so(tmp_path, damage):
    change = changes.Change("ties", 4, (0, 1), True, (4.0, 1.0, 1.0, 1.0, 0.25, 0.1, 0.5, 0.1, 0.2, 0.3))
    content = json.loads(changes.Changes(("a", "b"), {"w": change}).to_bytes())
    (tmp_path / FILE).write_text(json.dumps(content))
    assert read_changes(tmp_path).tensors == {"w": change}
    damage(content)
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(mg.errors.CheckpointError, match="is damaged"):
        read_changes(tmp_path)


@pytest.mark.skipif(tiles.library() is None, reason="no compiled runner")
@pytest.mark.parametrize(("models", "with_base"), [(1, True), (2, True), (3, True), (1, False), (2, False), (4, False)])
def test_sums_are_read_in_the_order_in_which_they_are_compared(models, with_base):
    parts = [torch.randn(5000, generator=torch.Generator().manual_seed(n)) for n in range(models + with_base + 1)]
    recorded = fused.record_comparison(models, with_base)
    table = fused.Addresses.of([StoredEntries.of(part) for part in parts], 0).table
    results = tiles.run(recorded.program, table, recorded.seeds, 0, 5000)
    assert changes.read_sums(results) == pytest.approx([5000, *fill_in(recorded.found, results)], rel=1e-15)
