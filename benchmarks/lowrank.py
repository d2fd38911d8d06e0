"""Low-rank merging and compression: TSV-Merge against the published algorithm, memory, and the expert library.

`python -m benchmarks.lowrank [--only library …] [--quick] [--json FILE]` prints ratios measured in one run:

- TSV-Merge against the published algorithm done with `torch.linalg.svd` in float32, on the matrices of transformer
  blocks, in time and in processor time, with the error of both against float64. Goal: ≥ 4× faster over the matrices
  of a ViT-L block at T = 8, error ≤ 1e-5;
- peak memory of a streamed TSV-Merge for many layers over that for few. Goal: 1;
- the size of a library of 20 experts with its base over the base alone, the energy it keeps, and the time to rebuild
  one expert over that of copying the base. Goals: ≤ 2.0 and ≤ 3.

What the JSON file holds already and was not asked for with --only is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.records import record
from merganser.library import Library
from merganser.methods.tsv import decompose, orthogonal_sum

BLOCKS = {
    "ViT-B/32": [(3072, 768), (768, 3072), (2304, 768), (768, 768)],
    "ViT-L/14": [(4096, 1024), (1024, 4096), (3072, 1024), (1024, 1024)],
    "Llama-1B": [(2048, 2048), (512, 2048), (5632, 2048), (2048, 5632)],
    "small": [(768, 192), (192, 768), (576, 192), (192, 192)],
}


def task_matrix(shape: tuple[int, int], seed: int, scale: float = 1e-3) -> Tensor:
    """A task matrix whose spectrum decays as fine-tuning's does: a power law over a floor of noise."""
    d, m = shape
    n = min(shape)
    rng = torch.Generator().manual_seed(seed)
    decay = torch.arange(1, n + 1, dtype=torch.float32) ** -0.7
    signal = (torch.randn(d, n, generator=rng) * decay) @ torch.randn(n, m, generator=rng) / n**0.5
    return scale * (signal + 0.02 * torch.randn(d, m, generator=rng))


def published(deltas: Sequence[Tensor]) -> Tensor:
    """TSV-Merge as in the thesis: an SVD of every task matrix, then SVDs of the concatenated factors."""
    k = max(1, min(deltas[0].shape) // len(deltas))
    lefts, values, rights = [], [], []
    for delta in deltas:
        u, s, vh = torch.linalg.svd(delta, full_matrices=False)
        lefts.append(u[:, :k])
        values.append(s[:k])
        rights.append(vh[:k])
    a, _, b = torch.linalg.svd(torch.cat(lefts, dim=1), full_matrices=False)
    e, _, f = torch.linalg.svd(torch.cat(rights, dim=0), full_matrices=False)
    return (a @ b * torch.cat(values)) @ (e @ f)


def ours(deltas: Sequence[Tensor]) -> Tensor:
    return orthogonal_sum(decompose(deltas, max(1, min(deltas[0].shape) // len(deltas))))


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, processor seconds, and the result."""
    began, used = time.perf_counter(), time.process_time()
    result = function()
    return time.perf_counter() - began, time.process_time() - used, result


def merging(block: str, tasks: int, reference: bool, repeats: int) -> dict[str, Any]:
    """Seconds over the matrices of a block, the median of `repeats` taken in turns, and the errors against float64."""
    rows = []
    for index, shape in enumerate(BLOCKS[block]):
        deltas = [task_matrix(shape, 1000 * index + task) for task in range(tasks)]
        row: dict[str, Any] = {"shape": list(shape)}
        functions = {"ours": ours, "published": published}
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
        results = {}
        for turn in range(repeats):
            for name in sorted(functions, reverse=bool(turn % 2)):
                seconds, processor, results[name] = timed(partial(functions[name], deltas))
                runs[name].append((seconds, processor))
        for name, taken in runs.items():
            row[name], row[f"{name}_processor"] = map(statistics.median, zip(*taken, strict=True))
        if reference:
            exact = published([delta.double() for delta in deltas])
            for name, result in results.items():
                row[f"{name}_error"] = float((result - exact).norm() / exact.norm())
        row["speedup"] = row["published"] / row["ours"]
        rows.append(row)
        print(f"  {block} T={tasks} {shape[0]}×{shape[1]}: {row['speedup']:.1f}× the published algorithm", flush=True)
    total = sum(row["published"] for row in rows) / sum(row["ours"] for row in rows)
    processor = sum(row["published_processor"] for row in rows) / sum(row["ours_processor"] for row in rows)
    return {"block": block, "tasks": tasks, "matrices": rows, "speedup": total, "processor_ratio": processor}


def write_models(directory: Path, layers: int, width: int, experts: int, dtype: torch.dtype) -> list[Path]:
    """A base and its experts with the matrices of small transformer blocks."""
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    paths = []
    for model in range(experts + 1):
        tensors = {}
        for layer in range(layers):
            for index, (name, shape) in enumerate(shapes.items()):
                rng = torch.Generator().manual_seed(100 * layer + index)
                base = torch.randn(shape, generator=rng) / width**0.5
                seed = 10_000 * model + 100 * layer + index
                tensors[f"layers.{layer}.{name}.weight"] = (
                    base if model == 0 else base + task_matrix(shape, seed, 0.02 / width**0.5)
                ).to(dtype)
            rng = torch.Generator().manual_seed(10_000 * model + 100 * layer + 99)
            shift = 0.02 / width**0.5 * torch.randn(width, generator=rng)
            tensors[f"layers.{layer}.norm.bias"] = (torch.zeros(width) if model == 0 else shift).to(dtype)
        path = directory / ("base" if model == 0 else f"expert{model}")
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors")
        paths.append(path)
    return paths


def memory(width: int, tasks: int, layers: Sequence[int]) -> dict[str, Any]:
    """Peak resident memory of a streamed merge beyond that of the imports, in processes of their own."""
    peaks = []
    for count in layers:
        with tempfile.TemporaryDirectory() as directory:
            paths = write_models(Path(directory), count, width, tasks, torch.float32)
            command = [sys.executable, "-m", "benchmarks.lowrank", "--peak", directory, *map(str, paths)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks.append(int(done.stdout))
    print(f"  peak memory of TSV-Merge, {layers[-1]} layers over {layers[0]}: {peaks[-1] / peaks[0]:.2f}×", flush=True)
    return {"layers": list(layers), "bytes": peaks, "ratio": peaks[-1] / peaks[0]}


def print_peak(directory: str, base: str, experts: Sequence[str]) -> None:
    """Merge and print the peak of anonymous memory: files that are mapped can be dropped at any time."""
    from merganser.recipes.running import run

    peak = 0

    def watch(_: object) -> None:
        nonlocal peak
        status = Path("/proc/self/status").read_text() if Path("/proc/self/status").exists() else ""
        anonymous = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")]
        peak = max(peak, anonymous[0] if anonymous else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    recipe = {"method": "tsv", "base": base, "models": [{"path": path} for path in experts]}
    run(recipe, Path(directory) / "merged", workers=1, on_progress=watch)
    print(peak)


def library(width: int, layers: int, experts: int) -> dict[str, Any]:
    """A library of `experts` within the base's own size again, and the energy it keeps."""
    with tempfile.TemporaryDirectory() as directory:
        base, *others = write_models(Path(directory), layers, width, experts, torch.bfloat16)
        weights = (base / "model.safetensors").stat().st_size
        named = {path.name: path for path in others}
        found = {}
        for dtype in ("bfloat16", "int8"):
            built = Library.build(base, named, Path(directory) / dtype, budget=int(0.995 * weights), dtype=dtype)
            energy = sum(record.energy for record in built.manifest.experts.values()) / experts
            found[dtype] = {"ratio": built.size().ratio, "energy": energy}
            print(
                f"  library of {experts} experts, {dtype}: {built.size().ratio:.2f}× the base, "
                f"{energy:.1%} of the energy kept",
                flush=True,
            )
        return {"experts": experts, "base_bytes": weights, **found}


def rebuilding(width: int, layers: int, repeats: int = 7) -> dict[str, Any]:
    """The time to get one expert back over that of copying the base, both synced; the median of several pairs."""
    with tempfile.TemporaryDirectory() as directory:
        base, expert = write_models(Path(directory), layers, width, 1, torch.bfloat16)
        built = Library.build(
            base, {"expert": expert}, Path(directory) / "library", rank_fraction=1 / 20, dtype="int8", randomized=True
        )
        ratios = []
        for _ in range(repeats):
            copied, rebuilt = Path(directory) / "copied", Path(directory) / "rebuilt"
            ratios.append(
                timed(partial(built.extract, "expert", rebuilt))[0] / timed(partial(copy, base, copied))[0],
            )
            shutil.rmtree(copied)
            shutil.rmtree(rebuilt)
        size = (base / "model.safetensors").stat().st_size
        ratio = statistics.median(ratios)
        print(f"  rebuilding one expert takes {ratio:.1f}× the time of copying the base ({size / 1e6:.0f} MB)")
        return {"base_bytes": size, "rebuild_over_copy": ratio, "ratios": ratios}


def copy(source: Path, target: Path) -> None:
    """Copy and sync, as a written checkpoint is synced."""
    shutil.copytree(source, target)
    for path in target.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def all_merging(options: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"TSV-Merge against the published algorithm ({torch.get_num_threads()} threads)")
    if options.quick:
        cases = [("small", 8), ("small", 20)]
    else:
        cases = [("ViT-L/14", 8), ("ViT-B/32", 8), ("ViT-B/32", 20), ("ViT-L/14", 20), ("Llama-1B", 8)]
        cases = [case for case in cases if case[0] in options.blocks]
    merges = []
    for block, tasks in cases:
        with_reference = options.quick or (block, tasks) in (("ViT-L/14", 8), ("ViT-B/32", 8))
        merges.append(merging(block, tasks, with_reference, repeats=3 if with_reference else 1))
        wall, processor = merges[-1]["speedup"], merges[-1]["processor_ratio"]
        print(f"{block} block, T={tasks}: {wall:.1f}× faster ({processor:.1f}× less processor time)", end="")
        errors = [row["ours_error"] for row in merges[-1]["matrices"] if "ours_error" in row]
        print(f", error against float64 {max(errors):.1e}" if errors else "")
    return merges


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "merging": all_merging,
    "memory": lambda options: memory(128 if options.quick else 384, 8, (2, 8) if options.quick else (3, 12)),
    "library": lambda options: library(192 if options.quick else 768, 2, 20),
    "rebuilding": lambda options: rebuilding(512 if options.quick else 1024, 4 if options.quick else 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small matrices, a minute in all")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--blocks", nargs="+", default=list(BLOCKS), choices=list(BLOCKS), help="only these")
    parser.add_argument("--json", type=Path, help="store the figures")
    parser.add_argument("--peak", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print_peak(options.peak[0], options.peak[1], options.peak[2:])
        return
    torch.set_grad_enabled(False)
    measured = json.loads(options.json.read_text())["results"] if options.json and options.json.exists() else {}
    for part in options.only:
        measured[part] = PARTS[part](options)
        results = {"threads": torch.get_num_threads()} | {name: measured[name] for name in PARTS if name in measured}
        record(options.json, results, [0], added=set(options.only) != set(PARTS))


if __name__ == "__main__":
    main()
