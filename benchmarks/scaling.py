"""Is the model of docs/scaling.md right here? Merges with one and two workers, predicted and measured.

    python -m benchmarks.scaling [--params 350M] [--methods linear ties tsv] [--json FILE]

Measures the constants of the machine, predicts merges of a base and two models whose files are in memory, and runs
them in processes of their own. Prints predicted and measured seconds and processor seconds; on a busy machine only the
latter mean much. tsv merges two matrices instead of a model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.machine import describe
from benchmarks.measuring import measure
from benchmarks.merge_speed import make_checkpoints, warm
from benchmarks.records import record
from merganser import recipes
from merganser.checkpoints.opening import open_headers
from merganser.scaling import constants
from merganser.scaling.times import Machine, Resources, describe_work, predict

MATRICES = {"a.weight": (1024, 1024), "b.weight": (2048, 1024)}
WORKERS = (1, 2)


def make_matrices(directory: Path) -> list[Path]:
    """Write three small checkpoints of matrices."""
    paths = [directory / f"matrices-{label}" for label in ("base", "a", "b")]
    for seed, path in enumerate(paths):
        path.mkdir(exist_ok=True)
        draw = torch.Generator().manual_seed(seed)
        tensors = {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in MATRICES.items()}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text("{}")
    return paths


def compare(method: str, paths: list[Path], machine: Machine, workers: int, directory: Path) -> dict[str, Any]:
    """Return predicted and measured costs of one merge."""
    base, *models = (str(path.absolute()) for path in paths[:3])
    based = {"models": [base, *models]} if method == "linear" else {"base": base, "models": models}
    config, out = directory / "scaling.json", directory / "out"
    config.write_text(json.dumps({"method": method, **based}))
    work = describe_work(recipes.prepare(recipes.load(config), open_headers))
    estimate = predict(work, machine, Resources(workers, cached=True))
    warm(paths[:3])
    command = [sys.executable, "-m", "merganser", "merge", str(config), str(out), "--workers", str(workers)]
    run = measure(command, out)
    shutil.rmtree(out)
    processor = machine.start_up + work.processor_seconds(machine)
    print(
        f"{method:<8} {workers} worker(s): predicted {estimate.seconds:.1f} s ({estimate.limit}), "
        f"took {run.seconds:.1f} s; "
        f"processor {processor:.1f} s predicted, {run.cpu_seconds:.1f} s taken ({run.cpu_seconds / processor:.2f}×)",
        flush=True,
    )
    return {
        "method": method,
        "workers": workers,
        "predicted": asdict(estimate),
        "predicted_processor": processor,
        "measured": asdict(run),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", default="350M", help="size of the models, e.g. 1.1B or 200M")
    parser.add_argument("--methods", nargs="+", default=["linear", "ties", "tsv"])
    parser.add_argument("--workdir", type=Path, default=Path(tempfile.gettempdir()) / "merganser-speed")
    parser.add_argument("--json", type=Path, help="store the figures")
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    print(describe())
    machine = constants.measure(options.workdir)
    print(", ".join(f"{name} {value:.4g}" for name, value in asdict(machine).items()), flush=True)
    paths = make_checkpoints(options.workdir, float(options.params[:-1]) * {"M": 1e6, "B": 1e9}[options.params[-1]])
    rows = [
        compare(method, make_matrices(options.workdir) if method == "tsv" else paths, machine, workers, options.workdir)
        for method in options.methods
        for workers in WORKERS
    ]
    record(options.json, {"machine": asdict(machine), "merges": rows}, seeds=())


if __name__ == "__main__":
    main()
