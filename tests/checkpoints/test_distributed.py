"""Torch distributed checkpoints and files of trainers: read without running what is pickled inside."""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import merganser as mg
from merganser.checkpoints.inert_pickle import load_inert
from merganser.errors import CheckpointError

STATE = {
    "a.weight": torch.arange(24.0).reshape(6, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "turned": torch.arange(6).reshape(2, 3).t(),
    "scalar": torch.tensor(3.0),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    nested = {"model": dict(STATE), "optimizer": {"state": {"x": torch.zeros(3)}}, "step": 3}
    dcp.save(nested, checkpoint_id=tmp_path / "ck", no_dist=True)
    return tmp_path / "ck"


def test_a_checkpoint_that_was_saved_again_is_read_again(tmp_path):
    for value in (1.0, 2.0):
        shutil.rmtree(tmp_path / "ck", ignore_errors=True)
        dcp.save({"model": {"w": torch.full((3,), value)}}, checkpoint_id=tmp_path / "ck", no_dist=True)
        assert mg.open(tmp_path / "ck")["w"].tolist() == [value] * 3


@pytest.mark.parametrize("key", ["optimizer", "opt", "adam"])
def test_optimisers_are_left_out_whatever_their_name(tmp_path, key):
    nested = {"model": {"w": torch.ones(2)}, key: {"state": {"w": {"exp_avg": torch.ones(2)}}}}
    dcp.save(nested, checkpoint_id=tmp_path / "ck", no_dist=True)
    assert mg.open(tmp_path / "ck").names() == ["w"]


def test_the_model_of_a_distributed_checkpoint(saved, tmp_path):
    opened = mg.open(saved)
    assert sorted(opened.names()) == sorted(STATE)
    for name, tensor in STATE.items():
        assert torch.equal(opened[name], tensor)
        assert opened.spec(name) == mg.checkpoints.TensorSpec(tuple(tensor.shape), tensor.dtype)
    assert torch.equal(opened.read("a.weight", (2, 5)), STATE["a.weight"][2:5])
    recipe = {"method": "linear", "models": [str(saved), str(saved) + "/../ck/"]}
    merged = mg.open(mg.run(recipe, tmp_path / "out"))
    assert torch.equal(merged["a.weight"], STATE["a.weight"])


def test_chunks_are_put_together(tmp_path):
    """A matrix cut along both axes, in two files, as ranks of a mesh write it."""
    whole = torch.randn(6, 8)
    chunks, places = [], {}
    for row, first in enumerate((0, 4)):
        with open(tmp_path / f"__{row}_0.distcp", "wb") as file:
            for column in (0, 3):
                part = whole[first : first + (4 if row == 0 else 2), column : 3 if column == 0 else 8].clone()
                offsets = torch.Size([first, column])
                start = file.tell()
                torch.save(part, file)
                chunks.append(ChunkStorageMetadata(offsets, part.shape))
                info = _StorageInfo(f"__{row}_0.distcp", start, file.tell() - start)
                places[MetadataIndex("w", offsets, len(chunks) - 1)] = info
    about = TensorStorageMetadata(TensorProperties(whole.dtype), whole.shape, chunks)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": about}, None, places)))
    opened = mg.open(tmp_path)
    assert torch.equal(opened["w"], whole)
    for rows in ((0, 6), (3, 5), (5, 6), (2, 2)):
        assert torch.equal(opened.read("w", rows), whole[slice(*rows)])
    lacking = {index: info for index, info in places.items() if index.offset != torch.Size([4, 3])}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": about}, None, lacking)))
    with pytest.raises(CheckpointError, match="not the metadata of a distributed checkpoint"):
        mg.open(tmp_path)
    about.chunks.pop()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": about}, None, lacking)))
    with pytest.raises(CheckpointError, match="do not make up"):
        mg.open(tmp_path)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_nothing_is_run(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (saved / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(CheckpointError, match="asks for posix.mkdir"):
        mg.open(saved)
    torch.save({"state_dict": {"w": torch.ones(2)}, "hyper_parameters": Runs()}, tmp_path / "m.ckpt")
    with pytest.raises(CheckpointError, match="refused: the pickle wants to run code"):
        mg.open(tmp_path / "m.ckpt")
    assert not (tmp_path / "ran").exists()


def test_incomplete_and_damaged_files_are_refused(saved, tmp_path):
    data = (saved / "__0_0.distcp").read_bytes()
    (saved / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="is the copy complete"):
        mg.open(saved)
    (saved / "__0_0.distcp").write_bytes(data.replace(b"archive/data/0", b"archive/data/9"))
    opened = mg.open(saved)
    with pytest.raises(CheckpointError, match="'a.weight' cannot be read"):
        opened.read("a.weight")
    with pytest.raises(ValueError, match="declares 2147483647 objects"):
        load_inert(b"\x80\x02}r\xff\xff\xff\x7f.", lambda _: True)
    (saved / ".metadata").write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(CheckpointError, match="not the metadata of a distributed checkpoint"):
        mg.open(saved)


def test_files_of_lightning_are_read_without_its_objects(tmp_path):
    """Lightning keeps settings of the run in classes of its own beside the weights."""
    settings = argparse.Namespace(lr=0.1, name="x", path=Path("y"))
    weights = {"net.weight": torch.randn(3, 4), "net.turned": torch.randn(2, 3).t(), "count": torch.tensor(3)}
    content = {
        "state_dict": {**weights, "net.tied": torch.nn.Parameter(weights["net.weight"])},
        "hyper_parameters": settings,
        "pytorch-lightning_version": "2.5",
        "loops": {"fit": [settings]},
    }
    torch.save(content, tmp_path / "m.ckpt")
    opened = mg.open(tmp_path / "m.ckpt")
    for name, tensor in weights.items():
        assert torch.equal(opened[name], tensor)
    assert dict(opened.aliases()) == {"net.tied": "net.weight"}
    torch.save(content | {"hyper_parameters": shutil.rmtree}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="refused"):
        mg.open(tmp_path / "other.ckpt")
    shutil.copy(tmp_path / "m.ckpt", tmp_path / "cut.ckpt")
    with open(tmp_path / "cut.ckpt", "r+b") as file:
        file.truncate(600)
    with pytest.raises(CheckpointError):
        mg.open(tmp_path / "cut.ckpt")
