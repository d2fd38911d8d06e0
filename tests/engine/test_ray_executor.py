"""The same plan on a local Ray cluster of two workers, one of them killed half-way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from merganser.errors import MerganserError
from merganser.recipes.running import run
from support.ray_runs import run_with_ray

pytest.importorskip("ray")

CLUSTER = """
import json, os, signal, sys
import psutil
import merganser.engine.execute as execute
from merganser.recipes.running import run
from support.ray_runs import exposed_addresses

execute.SPAN = 1  # a task for every tensor
killed, exposed = [], []

def kill_one(progress):
    if not exposed:
        exposed.append(exposed_addresses())
    if not killed and progress.done > progress.total // 4:
        children = psutil.Process().children(recursive=True)
        workers = [p for p in children if " ".join(p.cmdline()).startswith(("ray::_compute", "ray::IDLE"))]
        if workers:
            killed.append(workers[0].pid)
            os.kill(workers[0].pid, signal.SIGKILL)

run(json.loads(sys.argv[1]), sys.argv[2], ray="local", workers=2, overwrite=True, on_progress=kill_one)
assert killed, "no worker was found to kill"
assert exposed == [set()], f"a local cluster listens on {exposed}"
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
    out = tmp_path / "cluster"
    run_with_ray(CLUSTER, recipe, str(out), modules=Path(__file__).parent)
    local, cluster = (load_file(path / "model.safetensors") for path in (tmp_path / "local", out))
    assert local.keys() == cluster.keys()
    assert all(torch.equal(local[name], cluster[name]) for name in local)


def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    recipe = {"method": "linear", "models": [str(tmp_path / "a.safetensors")]}
    with pytest.raises(MerganserError, match="ray='nowhere'.*does not answer"):
        run(recipe, tmp_path / "out", ray="nowhere")
