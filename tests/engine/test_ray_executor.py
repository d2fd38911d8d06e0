"""The same plan on a local Ray cluster of two workers, one of them killed half-way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from merganser.engine.api import run
from merganser.engine.execute import Progress

ray = pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")


def test_ray_survives_a_dead_worker_and_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("base", "a", "b")):
        generator = torch.Generator().manual_seed(number)
        tensors = {f"layers.{i}.w": torch.randn(200, 300, generator=generator) for i in range(40)}
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    recipe = {
        "method": "dare_ties",
        "base": str(tmp_path / "base"),
        "models": [str(tmp_path / "a"), str(tmp_path / "b")],
    }
    run(recipe, tmp_path / "local")
    monkeypatch.setattr("merganser.engine.execute.SPAN", 1)  # a task for every tensor
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    killed: list[int] = []

    def kill_one(progress: Progress) -> None:
        if not killed and progress.done > progress.total // 4:
            workers = [p for p in psutil.Process().children(recursive=True) if "ray::" in " ".join(p.cmdline())]
            if workers:
                killed.append(workers[0].pid)
                os.kill(workers[0].pid, signal.SIGKILL)

    run(recipe, tmp_path / "cluster", ray="local", workers=2, on_progress=kill_one)
    assert killed
    local, cluster = (load_file(tmp_path / name / "model.safetensors") for name in ("local", "cluster"))
    assert local.keys() == cluster.keys()
    assert all(torch.equal(local[name], cluster[name]) for name in local)
