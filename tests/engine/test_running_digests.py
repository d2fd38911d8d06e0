"""Digests that are taken while tensors are computed, against those of the finished files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import merganser as mg
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine import blocks, running_digests
from merganser.engine.running_digests import RunningDigest
from merganser.kernels import tiles
from support.locked_models import digests


@given(st.lists(st.binary(max_size=8), max_size=6), st.booleans())
def test_in_order_or_not_at_all(parts: list[bytes], swapped: bool) -> None:
    whole = b"".join(parts)
    running, place = RunningDigest("sha256", len(whole)), 0
    for part in parts:
        running.add(place + (1 if swapped and place else 0), part)
        place += len(part)
    late = swapped and any(parts) and sum(map(bool, parts)) > 1
    if not late:
        assert running.finish() in (hashlib.sha256(whole).hexdigest(), None)
    if not swapped:
        assert running.finish() == hashlib.sha256(whole).hexdigest()
    running.add(0, b"again")
    assert running.finish() is None or not whole


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models with a tensor of several blocks, and spans of one block."""
    for seed, name in enumerate(("base", "math", "code")):
        draw = torch.Generator().manual_seed(seed)
        (tmp_path / name).mkdir()
        tensors = {"w": torch.randn(900, 1000, generator=draw), "v": torch.randn(300, 200, generator=draw).bfloat16()}
        save_file(tensors, tmp_path / name / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(blocks, "SPAN", 1 << 18)
    blocks.spans.cache_clear()
    yield tmp_path
    blocks.spans.cache_clear()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("method", ["linear", "ties", "della"])
def test_compiled_merges_note_the_same(large: Path, method: str, workers: int) -> None:
    base = {} if method == "linear" else {"base": "base"}
    out = mg.run({"method": method, **base, "models": ["math", "code"]}, "out", workers=workers)
    lock = mg.origin.read_lock(out)
    for name in ("math", "code", *base):
        assert lock.sources[f"{name}/model.safetensors"] == digests(large / name / "model.safetensors")
    assert lock.outputs["model.safetensors"] == digests(out / "model.safetensors")


def test_one_worker_reads_nothing_again(large: Path, monkeypatch) -> None:
    if tiles.library() is None:
        pytest.skip("no compiled runner")
    monkeypatch.setattr(
        "merganser.checkpoints.safetensors_file.SafetensorsFile.digest", lambda *_: pytest.fail("again")
    )
    monkeypatch.setattr("merganser.engine.shard_files.ShardFiles._read_back", lambda *_: pytest.fail("again"))
    mg.run({"method": "ties", "base": "base", "models": ["math", "code"]}, "out", workers=1)


def test_a_view_is_not_taken_for_its_file(large: Path) -> None:
    """Its values are others, in tensors of the same shape."""
    view = mg.open("base") + 0.5 * mg.TaskVector("math", "base")
    source = running_digests.SourceDigests("sha256")
    file = mg.open("base")._shards["model.safetensors"]
    source.follow([(file, "w")], [StoredEntries.of(view.read("w"))], 0)
    assert source.finish() == {}
