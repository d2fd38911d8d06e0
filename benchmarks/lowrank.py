"""Structured merges and compression against the published algorithms: time, memory, error, and the expert library.

`python -m benchmarks.lowrank [--only library …] [--blocks ViT-L/14 …] [--quick] [--json FILE]` prints ratios measured
in one run:

- tsv, iso_c and iso_cts against the published algorithms done with `torch.linalg.svd` in float32, on the matrices of
  transformer blocks, in turns: seconds, processor seconds, memory beyond the inputs in matrices, and the error of both
  against float64. Goals for tsv at T = 8: ≥ 8× over the matrices of a ViT-L and of a Llama-1B block, ≥ 10× for a matrix
  of Llama-8B, error ≤ 1e-4, memory ≤ 4 matrices (square ones cannot do with less than 5, see docs/scaling.md).
  For Llama-8B, and with --extrapolate for all, one SVD of a task matrix and those of the concatenated factors are
  timed, and the former is taken T times. For tsv, what the products and eigenvectors alone take is printed beside
  (`benchmarks/limits/decompositions.py`): the limit of the ratio;
- peak memory of a streamed TSV-Merge for many layers over that for few. Goal: 1;
- the size of a library of 20 experts with its base over the base alone, the energy it keeps, and the time to rebuild
  one expert over that of copying the base. Goals: ≤ 2.0 and ≤ 3.

What the JSON file holds already and was not asked for with --only is kept; so are blocks not asked for with --blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import published
from benchmarks.limits import decompositions as limits
from benchmarks.measuring import Peak, anonymous
from benchmarks.records import record
from merganser.engine.allocator import keep_freed_memory
from merganser.library import Library
from merganser.methods.base import Group
from merganser.methods.isotropic import IsoC, IsoCTS
from merganser.methods.tsv import TSV

BLOCKS = {
    "ViT-B/32": [(3072, 768), (768, 3072), (2304, 768), (768, 768)],
    "ViT-L/14": [(4096, 1024), (1024, 4096), (3072, 1024), (1024, 1024)],
    "Llama-1B": [(2048, 2048), (512, 2048), (8192, 2048), (2048, 8192)],
    "Llama-8B": [(4096, 14336)],
    "small": [(768, 192), (192, 768), (576, 192), (192, 192)],
}

RULES = {"tsv": TSV, "iso_c": IsoC, "iso_cts": IsoCTS}
#: The block whose published merge takes hours; --extrapolate estimates it for others too.
HUGE = "Llama-8B"
#: Blocks that are small enough to be merged in float64 too.
COMPARED = ("ViT-B/32", "ViT-L/14")
CASES = [
    *((method, "ViT-L/14", 8) for method in published.METHODS),
    ("tsv", "ViT-B/32", 8),
    ("tsv", "ViT-B/32", 20),
    ("tsv", "Llama-1B", 8),
    ("tsv", "Llama-8B", 8),
]
QUICK = [(method, "small", 8) for method in published.METHODS]


def task_matrix(shape: tuple[int, int], seed: int, scale: float = 1e-3) -> Tensor:
    """A task matrix whose spectrum decays as fine-tuning's does: a power law over a floor of noise."""
    d, m = shape
    n = min(shape)
    rng = torch.Generator().manual_seed(seed)
    decay = torch.arange(1, n + 1, dtype=torch.float32) ** -0.7
    signal = (torch.randn(d, n, generator=rng) * decay) @ torch.randn(n, m, generator=rng) / n**0.5
    return scale * (signal + 0.02 * torch.randn(d, m, generator=rng))


def ours(method: str, deltas: Sequence[Tensor], base: Tensor) -> Tensor:
    """The merged task matrix, as a merge computes it; `base` is zero."""
    return RULES[method]().merge(Group("weight", tuple(deltas), base))


def extrapolate_tsv(deltas: Sequence[Tensor], whole: int = 0) -> tuple[float, float]:
    """Seconds and processor seconds of the published TSV-Merge from one SVD of a task matrix and two of factors.

    Iso-CTS takes the SVD of the sum as well: `whole` counts such SVDs beside those of the tasks.
    """
    n, tasks = min(deltas[0].shape), len(deltas)
    one, used, (u, _, vh) = timed(partial(published.svd, deltas[0]))
    # Random mixtures of one task's factors stand for those of all: the cost of an SVD is the same.
    mixture = torch.randn(n, n, generator=torch.Generator().manual_seed(0)) / n**0.5
    sides = [timed(partial(published.orthogonalise, side))[:2] for side in (u @ mixture, mixture @ vh)]
    seconds, processor = map(sum, zip(*sides, strict=True))
    return (tasks + whole) * one + seconds, (tasks + whole) * used + processor


EXTRAPOLATIONS = {"tsv": extrapolate_tsv, "iso_cts": partial(extrapolate_tsv, whole=1)}


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, processor seconds, and the result."""
    began, used = time.perf_counter(), time.process_time()
    result = function()
    return time.perf_counter() - began, time.process_time() - used, result


def merging(
    method: str, block: str, tasks: int, *, reference: bool = False, repeats: int = 1, extrapolate: bool = False
) -> dict[str, Any]:
    """Seconds over the matrices of a block, the median of `repeats` taken in turns, memory, and errors."""
    rows = []
    for index, shape in enumerate(BLOCKS[block]):
        deltas = [task_matrix(shape, 1000 * index + task) for task in range(tasks)]
        base = torch.zeros(shape).fill_(0)  # an input as well: its pages must be there before memory is measured
        row: dict[str, Any] = {"shape": list(shape)}
        functions = {
            "ours": partial(ours, method, deltas, base),
            "published": partial(published.METHODS[method], deltas),
        }
        if extrapolate:
            row["published"], row["published_processor"] = EXTRAPOLATIONS[method](deltas)
            del functions["published"]
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
        results = {}
        for turn in range(repeats):
            for name in sorted(functions, reverse=bool(turn % 2)):
                with Peak() as peak:
                    seconds, processor, results[name] = timed(functions[name])
                runs[name].append((seconds, processor))
                row[f"{name}_memory"] = peak.bytes / (deltas[0].numel() * deltas[0].itemsize)
        for name, taken in runs.items():
            row[name], row[f"{name}_processor"] = map(statistics.median, zip(*taken, strict=True))
        if reference:
            exact = published.METHODS[method]([delta.double() for delta in deltas])
            for name, result in results.items():
                row[f"{name}_error"] = float((result - exact).norm() / exact.norm())
        row["speedup"] = row["published"] / row["ours"]
        if method == "tsv":
            row["limit"] = limits.tsv(deltas[0], tasks)
        rows.append(row)
        print(f"  {describe(method, block, tasks, row)}", flush=True)
    total = sum(row["published"] for row in rows) / sum(row["ours"] for row in rows)
    processor = sum(row["published_processor"] for row in rows) / sum(row["ours_processor"] for row in rows)
    found = {
        "method": method,
        "block": block,
        "tasks": tasks,
        "extrapolated": extrapolate,
        "matrices": rows,
        "speedup": total,
        "processor_ratio": processor,
    }
    if method == "tsv":
        alone = sum(sum(row["limit"].values()) for row in rows)
        found["limit_ratio"] = sum(row["published_processor"] for row in rows) / alone
    return found


def describe(method: str, block: str, tasks: int, row: Mapping[str, Any]) -> str:
    d, m = row["shape"]
    text = (
        f"{method} {block} T={tasks} {d}×{m}: {row['speedup']:.1f}× the published algorithm ({row['ours']:.2f} s of "
        f"{row['published']:.2f} s, processor {row['ours_processor']:.2f} s of {row['published_processor']:.2f} s, "
        f"memory {row['ours_memory']:.1f} matrices"
    )
    text += f" of {row['published_memory']:.1f})" if "published_memory" in row else ")"
    if "ours_error" in row:
        text += f", error {row['ours_error']:.1e}, the published one's in float32 {row['published_error']:.1e}"
    if "limit" in row:
        products, vectors = row["limit"]["products"], row["limit"]["eigenvectors"]
        text += f"; products and eigenvectors alone take {products:.2f} and {vectors:.2f} s of the processor"
    return text


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
    """Merge and print the peak of anonymous memory."""
    from merganser.recipes.running import run

    peak = 0

    def watch(_: object) -> None:
        nonlocal peak
        peak = max(peak, anonymous(os.getpid()))

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
    print(f"Structured merges against the published algorithms ({torch.get_num_threads()} threads)")
    cases = QUICK if options.quick else CASES
    for method in published.METHODS:  # imports are not what is measured
        ours(method, [task_matrix((640, 512), task) for task in range(8)], torch.zeros(640, 512))
    merges = []
    for method, block, tasks in cases:
        if block not in options.blocks or method not in options.methods:
            continue
        extrapolate = method in EXTRAPOLATIONS and (options.extrapolate or block == HUGE)
        compared = options.quick or (block in COMPARED and not extrapolate)
        repeats = options.repeats if compared else 1
        merges.append(merging(method, block, tasks, reference=compared, repeats=repeats, extrapolate=extrapolate))
        wall, processor = merges[-1]["speedup"], merges[-1]["processor_ratio"]
        limit = f", the limit is {merges[-1]['limit_ratio']:.1f}×" if method == "tsv" else ""
        print(f"{method}, {block} block, T={tasks}: {wall:.1f}× faster ({processor:.1f}× less processor time{limit})")
    return merges


def cases_of(merges: Sequence[Mapping[str, Any]]) -> set[tuple[Any, ...]]:
    return {(merge["method"], merge["block"], merge["tasks"]) for merge in merges}


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
    parser.add_argument("--methods", nargs="+", default=list(published.METHODS), choices=list(published.METHODS))
    parser.add_argument("--repeats", type=int, default=3, help="turns, where the result is compared with float64")
    parser.add_argument("--extrapolate", action="store_true", help="time one SVD of the published algorithm for all T")
    parser.add_argument("--json", type=Path, help="store the figures")
    parser.add_argument("--peak", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print_peak(options.peak[0], options.peak[1], options.peak[2:])
        return
    torch.set_grad_enabled(False)
    keep_freed_memory()  # as commands do
    measured = json.loads(options.json.read_text())["results"] if options.json and options.json.exists() else {}
    for part in options.only:
        found = PARTS[part](options)
        if part == "merging":
            earlier = [merge for merge in measured.get(part, []) if "method" in merge]
            found = [m for m in earlier if not cases_of([m]) & cases_of(found)] + found
        measured[part] = found
        results = {"threads": torch.get_num_threads()} | {name: measured[name] for name in PARTS if name in measured}
        record(options.json, results, [0], added=set(options.only) != set(PARTS))


if __name__ == "__main__":
    main()
