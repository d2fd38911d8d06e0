"""Masks over a shared vector against their formulas, and beside the library."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import merganser as mg
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.vectors import Stored
from merganser.errors import CheckpointError, InputError, MerganserError
from merganser.library.library import Library
from merganser.library.mask_bits import Packed, unpack
from merganser.library.masks import MaskLibrary
from merganser.methods.matrices import matrix_shape

SHAPES = {"a.weight": (48, 33), "cube": (3, 5, 7), "norm": (33,), "one": (), "none": (0, 4)}
NAMES = ("math", "code", "chat")


@pytest.fixture
def world(checkpoint):
    rng = torch.Generator().manual_seed(0)
    base = {n: torch.randn(s, generator=rng) for n, s in SHAPES.items()} | {"steps": torch.tensor([3])}
    states = {
        name: base | {n: base[n] + 0.1 * torch.randn(s, generator=rng) for n, s in SHAPES.items()} for name in NAMES
    }
    paths = {name: checkpoint(name, state) for name, state in states.items()}
    return base, states, checkpoint("base", base), paths


def deltas(base, states, name):
    return {task: state[name].double() - base[name].double() for task, state in states.items()}


@pytest.mark.parametrize("threshold", [0.0, 0.4, 2.0])
def test_tall_masks_are_the_formula(world, tmp_path, threshold):
    base, states, path, paths = world
    made = MaskLibrary.build(path, paths, tmp_path / "m", threshold=threshold)
    for task in NAMES:
        for name in SHAPES:
            each = deltas(base, states, name)
            total = sum(each.values())
            mask = each[task].abs() > threshold * (total - each[task]).abs()
            assert torch.equal(made.expert(task).mask(name), mask)
            expected = base[name].double() + total * mask
            assert torch.allclose(made.expert(task).read(name).double(), expected, atol=1e-6)
        assert torch.equal(made.expert(task).read("steps"), base["steps"])
        assert 0 < made.density(task) <= 1


def test_tall_masks_can_share_the_task_vector_of_any_merge(world, tmp_path):
    base, states, path, paths = world
    merged = mg.merge(states, "ties", base, density=0.5, normalize=False)
    made = MaskLibrary.build(path, paths, tmp_path / "m", threshold=0.5, merged=merged)
    for task in NAMES:
        for name in SHAPES:
            shared, own = merged[name] - base[name], states[task][name] - base[name]
            mask = own.abs() > 0.5 * (shared - own).abs()
            assert torch.equal(made.expert(task).mask(name), mask)
            assert torch.allclose(made.expert(task).read(name), base[name] + shared * mask, atol=1e-6)
    assert torch.allclose(made.merge().read("norm"), merged["norm"], atol=1e-6)


def test_emr_is_the_formula(world, tmp_path):
    base, states, path, paths = world
    made = MaskLibrary.build(path, paths, tmp_path / "m", kind="emr")
    unified, own, kept = {}, dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)
    for name in SHAPES:
        each = {t: d.numpy() for t, d in deltas(base, states, name).items()}
        sign = np.sign(sum(each.values()))
        largest = np.max([np.where(d * sign > 0, np.abs(d), 0) for d in each.values()], axis=0)
        unified[name] = sign * largest
        for task in NAMES:
            own[task] += np.abs(each[task]).sum()
            kept[task] += np.abs(unified[name][each[task] * unified[name] > 0]).sum()
    for task in NAMES:
        for name in SHAPES:
            delta = deltas(base, states, name)[task].numpy()
            expected = base[name].double().numpy() + own[task] / kept[task] * unified[name] * (
                delta * unified[name] > 0
            )
            assert np.allclose(made.expert(task).read(name).double().numpy(), expected, atol=1e-5)
    merged = made.merge(0.5).read("norm").double().numpy()
    assert np.allclose(merged, base["norm"].double().numpy() + 0.5 * unified["norm"], atol=1e-6)


@given(st.lists(st.integers(1, 21), min_size=0, max_size=3), st.integers(0, 2**31))
def test_bits_come_back(shape, seed):
    shape = tuple(shape)
    delta = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    vector = Stored(StateDict({"w": delta}))
    packed = Packed(vector, Stored(StateDict({"w": torch.ones(shape)})), "emr", 0.0, StateDict({}), [])
    assert packed.read("w").shape == packed.spec("w").shape
    stored = StateDict({"w": packed.read("w")})
    assert torch.equal(unpack(stored, "w", shape, None), delta > 0)
    if len(shape) > 1:
        assert torch.equal(unpack(stored, "w", shape, (1, shape[0])), delta[1:] > 0)
        assert packed.spec("w").numel == matrix_shape(shape)[0] * -(-matrix_shape(shape)[1] // 8)


def test_rows_equal_the_whole_and_reopening_gives_the_same(world, tmp_path):
    _, _, path, paths = world
    MaskLibrary.build(path, paths, tmp_path / "m")
    made = MaskLibrary(tmp_path / "m")
    expert = made.expert("code")
    assert torch.equal(expert.read("a.weight", (5, 17)), expert.read("a.weight")[5:17])
    assert torch.equal(expert.read("norm", (5, 17)), expert.read("norm")[5:17])
    out = made.extract("code", tmp_path / "code_again")
    for name in SHAPES:
        assert torch.equal(mg.open(out).read(name), expert.read(name))
    assert (made.experts, len(made), "math" in made, "x" in made) == (NAMES, 3, True, False)


def test_an_expert_is_opened_by_its_place_and_saved(world, tmp_path):
    _, _, path, paths = world
    made = MaskLibrary.build(path, paths, tmp_path / "m")
    opened = mg.open(tmp_path / "m/experts/code")
    assert opened.fingerprint() == made.expert("code").fingerprint()
    assert torch.equal(opened.read("a.weight"), made.expert("code").read("a.weight"))
    saved = mg.save(made.expert("code"), tmp_path / "out", dtype="bf16")
    assert torch.equal(mg.open(saved).read("norm"), opened.read("norm").bfloat16())
    with pytest.raises(CheckpointError, match="a library of masks; open one of math, code, chat as"):
        mg.open(tmp_path / "m")
    with pytest.raises(InputError, match="cannot be replaced"):
        mg.save(opened, path, overwrite=True)


def test_storage_and_fidelity_beside_the_library(world, tmp_path):
    base, states, path, paths = world
    masks = MaskLibrary.build(path, paths, tmp_path / "m")
    library = Library.build(path, paths, tmp_path / "l")
    size = masks.size()
    entries = sum(torch.Size(s).numel() for s in SHAPES.values())
    assert size.shared == 4 * entries
    assert all(entries / 8 <= nbytes <= entries / 8 + 48 + 20 for nbytes in size.experts.values())
    assert size.total == size.base + size.shared + sum(size.experts.values())
    assert size.base == library.size().base
    assert size.ratio == size.total / size.base

    def error(made, task):
        wrong = sum(float((made.expert(task).read(n) - states[task][n]).square().sum()) for n in SHAPES)
        return wrong / sum(float((states[task][n] - base[n]).square().sum()) for n in SHAPES)

    for task in NAMES:
        assert 0 < error(masks, task) < 1
        assert 0 < error(library, task) < 1


def test_heads_are_kept_whole(world, tmp_path):
    base, states, *_ = world
    states["math"]["head"] = torch.randn(4, 33)
    states["code"]["norm"] = torch.randn(7)
    states["chat"]["steps"] = torch.tensor([9])
    made = MaskLibrary.build(base, states, tmp_path / "m", threshold={"math": 0.2, "code": 0.4, "chat": 0.6})
    for task, name in (("math", "head"), ("math", "norm"), ("code", "norm"), ("chat", "norm"), ("chat", "steps")):
        assert torch.equal(made.expert(task).read(name), states[task][name])
        assert made.expert(task).spec(name).shape == states[task][name].shape
    assert "head" in made.expert("math").names()
    assert "head" not in made.expert("code").names()
    assert (tmp_path / "m" / "base").is_dir()
    assert torch.equal(MaskLibrary(tmp_path / "m").expert("chat").read("steps"), torch.tensor([9]))


def test_a_tied_name_has_the_shape_of_the_tensor_it_names(tmp_path):
    def tied(rows):
        tokens, head = torch.nn.Embedding(rows, 4), torch.nn.Linear(4, rows)
        head.weight = tokens.weight
        return torch.nn.ModuleDict({"tokens": tokens, "norm": torch.nn.LayerNorm(4), "head": head})

    base, tuned = tied(10), tied(12)
    tuned["norm"].weight.data += 1
    expert = MaskLibrary.build(base, {"e": tuned}, tmp_path / "m").expert("e")
    for name in ("tokens.weight", "head.weight"):
        assert expert.spec(name).shape == tuple(expert.read(name).shape) == (12, 4)


def test_one_expert_is_itself(world, tmp_path):
    _, states, path, paths = world
    for kind in ("tall", "emr"):
        made = MaskLibrary.build(path, {"math": paths["math"]}, tmp_path / kind, kind=kind)
        for name in SHAPES:
            assert torch.allclose(made.expert("math").read(name), states["math"][name], atol=1e-6)


def test_refusals(world, tmp_path):
    base, _, path, paths = world
    with pytest.raises(InputError, match="did you mean 'tall'"):
        MaskLibrary.build(path, paths, tmp_path / "m", kind="tal")
    with pytest.raises(InputError, match="at least one expert"):
        MaskLibrary.build(path, {}, tmp_path / "m")
    with pytest.raises(InputError, match="cannot name an expert"):
        MaskLibrary.build(path, {"a/b": paths["math"]}, tmp_path / "m")
    with pytest.raises(CheckpointError, match="has no 'norm'"):
        MaskLibrary.build(base, {"x": {k: v for k, v in base.items() if k != "norm"}}, tmp_path / "m")
    with pytest.raises(CheckpointError, match="not a library of masks"):
        MaskLibrary(tmp_path)
    made = MaskLibrary.build(path, paths, tmp_path / "ok")
    with pytest.raises(InputError, match="did you mean 'math'"):
        made.expert("maht")
    with pytest.raises(InputError, match="exists already"):
        MaskLibrary.build(path, paths, tmp_path / "ok")
    with pytest.raises(CheckpointError, match="not the base"):
        MaskLibrary(tmp_path / "ok", base=paths["math"])
    manifest = tmp_path / "ok" / "masks.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 99}))
    with pytest.raises(CheckpointError, match="another version"):
        MaskLibrary(tmp_path / "ok")


def test_input_is_checked_before_any_work(world, tmp_path, monkeypatch):
    base, states, path, paths = world
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("merganser.library.masks.save", lambda *_, **__: pytest.fail("work began"))
        for threshold, message in (
            ({"math": 0.2}, "missing for the expert 'code'"),
            ({"math": 0.2, "code": 0.2, "chat": 0.2, "caht": 0.2}, "did you mean 'chat'"),
            (-1, "number of at least 0, got -1"),
            (float("nan"), "got nan"),
            (float("inf"), "got inf"),
            ("0.4", "got '0.4'"),
        ):
            with pytest.raises(InputError, match=message):
                MaskLibrary.build(path, paths, tmp_path / "m", threshold=threshold)
        with pytest.raises(InputError, match="did you mean 'bfloat16'"):
            MaskLibrary.build(path, paths, tmp_path / "m", dtype="bfloat61")
        with pytest.raises(InputError, match="exists already"):
            MaskLibrary.build(path, paths, tmp_path / "file")
        with pytest.raises(InputError, match="is not a directory"):
            MaskLibrary.build(path, paths, tmp_path / "file/m")
        with pytest.raises(InputError, match="elect a vector of their own"):
            MaskLibrary.build(path, paths, tmp_path / "m", kind="emr", merged=base)
        with pytest.raises(CheckpointError, match="has no 'cube'"):
            MaskLibrary.build(path, paths, tmp_path / "m", merged={n: t for n, t in base.items() if n != "cube"})
        spoilt = base | {"norm": torch.full_like(base["norm"], float("nan"))}
        with pytest.raises(CheckpointError, match="the merge, state dict: tensor 'norm' contains NaN"):
            MaskLibrary.build(path, paths, tmp_path / "m", merged=spoilt)
        states["code"]["norm"][3] = float("nan")
        with pytest.raises(CheckpointError, match="expert 'code', state dict: tensor 'norm' contains NaN"):
            MaskLibrary.build(base, states, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    made = MaskLibrary.build(path, paths, tmp_path / "empty", dtype="bfloat16")
    assert mg.open(tmp_path / "empty/shared").spec("norm").dtype == torch.bfloat16
    with pytest.raises(InputError, match="cannot be replaced"):
        made.extract("math", tmp_path / "empty", overwrite=True)


def test_a_build_that_fails_leaves_nothing(world, tmp_path, monkeypatch):
    _, _, path, paths = world
    before = sorted(tmp_path.iterdir())

    def fail(*_):
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr("merganser.library.masks.write_json", fail)
        with pytest.raises(MerganserError, match="could not be written: full"):
            MaskLibrary.build(path, paths, tmp_path / "m")
    assert sorted(tmp_path.iterdir()) == before
    assert MaskLibrary.build(path, paths, tmp_path / "m").experts == NAMES


@pytest.mark.parametrize("change", [{"kind": None}, {"experts": []}, {"experts": {"math": {}}}])
def test_a_damaged_manifest_is_named(world, tmp_path, change):
    _, _, path, paths = world
    MaskLibrary.build(path, paths, tmp_path / "m")
    manifest = tmp_path / "m" / "masks.json"
    content = json.loads(manifest.read_text()) | change
    manifest.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    with pytest.raises(CheckpointError, match=r"masks\.json: (experts: (math: )?)?damaged"):
        MaskLibrary(tmp_path / "m")
