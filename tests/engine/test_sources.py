"""Inputs that change while they are merged, and inputs where results go."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.engine.blocks import Piece, cut
from merganser.engine.checksums import Tally, checksum
from merganser.engine.disk import Disk
from merganser.engine.lock import Lock
from merganser.errors import CheckpointError, InputError, MerganserError
from support.plans import make_plan, random_models


@pytest.fixture
def recipe(checkpoint: Callable[..., Path]) -> dict[str, Any]:
    models = [checkpoint(name, {f"w{i}": torch.full((300, 300), value) for i in range(4)}) for name, value in MODELS]
    return {"method": "linear", "models": [str(model) for model in models]}


MODELS = (("a", 1.0), ("b", 3.0))


def rewrite(file: Path) -> None:
    with file.open("r+b") as weights:
        weights.seek(-8, os.SEEK_END)
        weights.write(b"\1" * 8)


def replace(file: Path) -> None:
    shutil.copy(file, file.with_suffix(".copy"))
    os.replace(file.with_suffix(".copy"), file)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("change", [rewrite, replace, cut_short, os.unlink])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_changes_meanwhile_is_refused(
    recipe: dict[str, Any], tmp_path: Path, change: Callable[[Path], None], workers: int
) -> None:
    file = tmp_path / "b" / "model.safetensors"
    changed: list[object] = []

    def meddle(progress: object) -> None:
        if not changed:
            changed.append(progress)
            change(file)

    with pytest.raises(CheckpointError, match=r"b/model.safetensors was written, replaced or removed during"):
        mg.run(recipe, tmp_path / "out", workers=workers, on_progress=meddle)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_reading_beyond_the_end_of_a_file_that_was_cut_short(recipe: dict[str, Any], tmp_path: Path) -> None:
    opened = mg.open(tmp_path / "b")
    cut_short(tmp_path / "b" / "model.safetensors")
    with pytest.raises(CheckpointError, match="was truncated while it was read"):
        opened.read("w3")


SIGBUS = """
import os, signal, sys
import merganser.engine.processes as processes
import merganser.engine.execute as execute
from merganser.recipes.running import run
from merganser.errors import MerganserError

execute.SPAN, processes._WORTH = 1, 0

def die(batch, sink):
    os.truncate(sys.argv[2], 4096)
    os.kill(os.getpid(), signal.SIGBUS)

processes.run_batch = die
try:
    run(sys.argv[1], sys.argv[3], workers=2, processes=True)
except MerganserError as error:
    print(type(error).__name__, error, "|", error.__cause__)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_a_worker_that_read_beyond_the_end(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "recipe.yml").write_text(str(recipe))
    file = tmp_path / "b" / "model.safetensors"
    command = [sys.executable, "-c", SIGBUS, tmp_path / "recipe.yml", file, tmp_path / "out"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert "CheckpointError" in done.stdout, done.stderr
    assert f"{file} was written, replaced or removed" in done.stdout
    assert f"signal {int(signal.SIGBUS)} (a file it read was cut short, or its disk failed)" in done.stdout


@pytest.mark.parametrize("out", ["models", "models/a", "models/a/inner", "link", "models/a/../a"])
def test_places_that_hold_or_are_inside_an_input(checkpoint: Callable[..., Path], tmp_path: Path, out: str) -> None:
    model = checkpoint("models/a", {"w": torch.ones(4)})
    (model / "inner").mkdir()
    (model / "inner" / "notes").write_text("mine")
    (tmp_path / "link").symlink_to(model)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(InputError, match=r"cannot be replaced: (the input .* is in it|it is (in )?the input)"):
        mg.run({"method": "linear", "models": [str(model)]}, tmp_path / out, overwrite=True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    mg.run({"method": "linear", "models": [str(model)]}, model / "new")  # nothing stands there


def test_an_input_in_the_staging_directory_is_not_removed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = checkpoint("out.partial/model", {"w": torch.ones(4)})
    (tmp_path / "out.partial" / "journal").touch()
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(InputError, match=r"out.partial cannot be replaced: the input .* is in it"):
            mg.run({"method": "linear", "models": [str(model)]}, tmp_path / "out", **options)
    assert (model / "model.safetensors").exists()


def test_adapters_and_statistics_are_inputs_too(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    base = checkpoint("base", {"layer.weight": torch.ones(4, 4)})
    adapter = tmp_path / "out" / "adapter"
    adapter.mkdir(parents=True)
    pair = {"lora_A": torch.ones(1, 4), "lora_B": torch.ones(4, 1)}
    save_file({f"base_model.model.layer.{k}.weight": v for k, v in pair.items()}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(
        f'{{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": "{base}"}}'
    )
    for reference in (str(adapter), f"{base}+{adapter}"):
        for out in (tmp_path / "out", base):
            with pytest.raises(InputError, match="cannot be replaced: (it is )?the input"):
                mg.run({"method": "linear", "models": [reference]}, out, overwrite=True)
            with pytest.raises(InputError, match="cannot be replaced: (it is )?the input"):
                mg.save(reference, out, overwrite=True)
    fisher = tmp_path / "kept" / "fisher.safetensors"
    fisher.parent.mkdir()
    save_file({"layer.weight": torch.ones(4, 4)}, fisher)
    with pytest.raises(InputError, match=r"kept cannot be replaced: the input .*fisher.safetensors is in it"):
        mg.run(
            {"method": "fisher", "models": [{"path": str(base), "fisher": str(fisher)}]}, fisher.parent, overwrite=True
        )


def test_every_entry_is_written_exactly_once() -> None:
    plan, _ = make_plan(random_models(1), "linear")
    output = next(output for output in plan.outputs if output.name == "big")
    blocks = cut(output.spec.shape, 1 << 18)
    data = torch.randn(output.spec.shape).view(-1)
    content = memoryview(data.view(torch.uint8).numpy()).cast("B")

    def part(piece: Piece) -> memoryview:
        return content[4 * piece.offset : 4 * (piece.offset + piece.numel)]

    tally = Tally()
    for block in reversed(blocks):
        tally.add(output, block, part(block))
    with pytest.raises(MerganserError, match="written twice"):
        tally.add(output, blocks[0], part(blocks[0]))
    found = tally.close(output)
    assert found == checksum(output, lambda start, stop: bytes(content[start:stop]))
    tally.add(output, Piece(0, 700, 0, 700 * 640), content)  # in one piece: the same checksum
    assert tally.close(output) == found
    for missing in range(len(blocks)):
        for number, block in enumerate(blocks):
            if number != missing:
                tally.add(output, block, part(block))
        with pytest.raises(MerganserError, match="never|of 448000 entries"):
            tally.close(output)
    with pytest.raises(MerganserError, match="bytes were made for"):
        tally.add(output, blocks[0], part(blocks[0])[:-4])


class NoLocks:
    """A file system without locks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(handle: int, how: int) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr("fcntl.flock", refuse)


def test_a_lock_where_the_file_system_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NoLocks(monkeypatch)
    first = Lock(tmp_path / "out", Disk())
    with pytest.raises(InputError, match=r"another process is writing there; if that is wrong, remove .*\.out\.owner"):
        Lock(tmp_path / "out", Disk())
    first.release()
    assert os.listdir(tmp_path) == []
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = os.uname().nodename
    (tmp_path / ".out.owner").write_text(f"{host} {ended.pid}")
    Lock(tmp_path / "out", Disk()).release()  # its owner is gone
    (tmp_path / ".out.owner").write_text("elsewhere 1")
    with pytest.raises(InputError, match="another process"):
        Lock(tmp_path / "out", Disk())


def test_a_file_of_somebody_else_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").write_text("mine")
    with pytest.raises(InputError, match="exists and was not written by merganser"):
        Lock(tmp_path / "out", Disk())
    assert (tmp_path / ".out.lock").read_text() == "mine"
