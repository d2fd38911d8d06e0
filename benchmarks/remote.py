"""Is the latency of an object store hidden?

    python -m benchmarks.remote [--delay 0.05] [--layers 24] [--times 3]

Merges three small models by `ties` from disk, and from a server on this machine that waits before every answer: with
read-ahead, and one request after another. The server is a process of its own. Prints seconds and ratios of one run, and
fails if the bytes differ.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.checkpoints.remote import models, read_ahead
from merganser.checkpoints.remote.tensors import RemoteSafetensors
from tests.support.range_server import RangeServer

NAMES = ("base", "math", "code")


def make_models(directory: Path, layers: int) -> None:
    """Write three models of seven tensors a layer."""
    for seed, name in enumerate(NAMES):
        draw = torch.Generator().manual_seed(seed)
        tensors = {
            f"layers.{i}.{part}": torch.randn(512, 512, generator=draw).bfloat16()
            for i in range(layers)
            for part in ("q", "k", "v", "o", "up", "down")
        } | {f"layers.{i}.norm": torch.randn(512, generator=draw) for i in range(layers)}
        (directory / name).mkdir(parents=True)
        save_file(tensors, directory / name / "model.safetensors")


def serve(directory: Path, delay: float, pipe: Any) -> None:
    """Serve a directory until the other end of the pipe says to stop."""
    with RangeServer(directory, delay) as server:
        pipe.send(server.url)
        pipe.recv()
        pipe.send(len(server.requests))


def merge(place: str, out: Path) -> float:
    """Merge the models at a place; return the seconds it took."""
    models.fetch_small_files.cache_clear()
    read_ahead._of_process.cache_clear()
    began = time.monotonic()
    recipe = {"method": "ties", "base": f"{place}/base", "models": [f"{place}/math", f"{place}/code"]}
    mg.run(recipe, out, overwrite=True, workers=2)
    return time.monotonic() - began


def one_by_one(place: str, out: Path) -> float:
    """`merge` without read-ahead."""
    ahead, RemoteSafetensors.prefetch = RemoteSafetensors.prefetch, lambda self, name, rows=None: None
    try:
        return merge(place, out)
    finally:
        RemoteSafetensors.prefetch = ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds before every answer")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        make_models(place, options.layers)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(place, options.delay, theirs))
        server.start()
        url = ours.recv()
        runs = {
            "from disk": lambda out: merge(str(place), out),
            "with read-ahead": lambda out: merge(url, out),
            "one request after another": lambda out: one_by_one(url, out),
        }
        merge(str(place), place / "warm")
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.times):
            for name, run in runs.items():
                found[name].append(run(place / name))
        same = {(place / name / "model.safetensors").read_bytes() for name in runs}
        ours.send("stop")
        asked = ours.recv() / (2 * options.times)
        server.join()
    assert len(same) == 1, "the bytes differ"
    disk = statistics.median(found["from disk"])
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"{name:<27} {middle:6.2f} s  {middle / disk:5.1f} x from disk")
    waits = asked * options.delay
    print(f"{asked:.0f} requests of {options.delay * 1000:.0f} ms, {waits:.1f} s if each waited for the one before")


if __name__ == "__main__":
    main()
