"""The same plan on a local Ray cluster of two workers, one of them killed half-way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from merganser.engine.api import run

pytest.importorskip("ray")
pytest.importorskip("psutil")

# Ray takes down the process it runs in when it is unhappy; the test's own must survive that.
CLUSTER = """
import json, os, signal, sys
import psutil
import merganser.engine.execute as execute
from merganser.engine.api import run

execute.SPAN = 1  # a task for every tensor
killed = []

def kill_one(progress):
    if not killed and progress.done > progress.total // 4:
        children = psutil.Process().children(recursive=True)
        workers = [p for p in children if " ".join(p.cmdline()).startswith(("ray::_compute", "ray::IDLE"))]
        if workers:
            killed.append(workers[0].pid)
            os.kill(workers[0].pid, signal.SIGKILL)

run(json.loads(sys.argv[1]), sys.argv[2], ray="local", workers=2, on_progress=kill_one)
assert killed, "no worker was found to kill"
"""


def test_ray_survives_a_dead_worker_and_changes_no_bit(tmp_path: Path) -> None:
    for number, name in enumerate(("base", "a", "b")):
        generator = torch.Generator().manual_seed(number)
        tensors = {f"layers.{i}.w": torch.randn(200, 300, generator=generator) for i in range(40)}
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    recipe = f'{{"method": "dare_ties", "base": "{tmp_path}/base", "models": ["{tmp_path}/a", "{tmp_path}/b"]}}'
    (tmp_path / "recipe.yml").write_text(recipe)
    run(tmp_path / "recipe.yml", tmp_path / "local")
    command = [sys.executable, "-c", CLUSTER, recipe, str(tmp_path / "cluster")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    local, cluster = (load_file(tmp_path / name / "model.safetensors") for name in ("local", "cluster"))
    assert local.keys() == cluster.keys()
    assert all(torch.equal(local[name], cluster[name]) for name in local)
