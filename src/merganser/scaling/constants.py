"""The constants of a machine, measured in a few seconds.

Arithmetic is measured by merging small models with one worker, in processor seconds, so that what else runs on the
machine matters little; disks by the clock, since waiting is what they cost.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from merganser.errors import MerganserError
from merganser.lazy import torch
from merganser.scaling.times import Machine, Work, merge_of

if TYPE_CHECKING:
    from torch import Tensor

#: How much is asked of a disk at once.
_PIECE = 1 << 23
_SMALL_READS = 64
_SMALL_TENSORS = 300
#: How many models have the matrix whose decomposition is timed.
TASKS = 4


def measure(directory: Path, size: int = 1 << 26) -> Machine:
    """Return the constants of this machine, with `directory` on the disk in question.

    Args:
        directory: Where temporary files go; what is made there is removed.
        size: Bytes of the files that are written, read and merged; the matrix that is decomposed has size/64 entries.

    Returns:
        The constants.

    Raises:
        MerganserError: A merge could not be run.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with tempfile.TemporaryDirectory(dir=directory, prefix="merganser-bench-") as name:
        place = Path(name)
        disk = measure_disk(place / "file", size, cores)
        shapes = {f"w{index}": (1024, 1024) for index in range(max(1, size // (3 << 21)))}
        base = _measure_merging(place / "small", {f"w{index}": (8, 8) for index in range(_SMALL_TENSORS)}, 2, "linear")[
            0
        ]
        per_tensor = base / _SMALL_TENSORS

        side = max(2, math.isqrt(size // 64))

        def rate(method: str, kind: str, shapes: Mapping[str, tuple[int, ...]], models: int) -> float:
            seconds, work = _measure_merging(place / method, shapes, models, method, kind)
            return work.amounts[kind] / max(seconds - work.tensors * per_tensor, 1e-9)

        return Machine(
            cores=cores,
            start_up=measure_start_up(place / "start"),
            per_tensor=per_tensor,
            elementwise=rate("linear", "elementwise", shapes, 2),
            reduce_map=rate("ties", "reduce_map", shapes, 2),
            whole=rate("tsv", "whole", {"w": (side, side)}, TASKS),
            **disk,
        )


def measure_disk(path: Path, size: int, threads: int) -> dict[str, float]:
    """Return rates of writing and reading a file of `size` bytes at `path`, and the latency of small reads."""
    piece = os.urandom(min(_PIECE, size))
    count = max(1, size // len(piece))

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(count):
                file.write(piece)
            os.fsync(file.fileno())

    written = count * len(piece) / _seconds(write)
    handle = os.open(path, os.O_RDONLY)

    def read(offset: int = 0) -> None:
        for index in range(count):
            os.pread(handle, len(piece), (index + offset) % count * len(piece))

    def read_little(index: int) -> float:
        return _seconds(lambda: os.pread(handle, 4096, index * (count * len(piece) // _SMALL_READS) // 4096 * 4096))

    try:
        _forget(handle)
        latency = statistics.median(map(read_little, range(_SMALL_READS)))
        _forget(handle)
        cold = count * len(piece) / _seconds(read)
        warm = count * len(piece) / _seconds(read)
        with ThreadPoolExecutor(threads) as pool:
            together = _seconds(lambda: list(pool.map(read, range(threads))))
    finally:
        os.close(handle)
    return {
        "write": written,
        "read": cold,
        "read_cached": warm,
        "read_cached_all": threads * count * len(piece) / together,
        "latency": latency,
    }


def measure_start_up(directory: Path) -> float:
    """Return the processor seconds of a merge of one small tensor by the command line."""
    recipe = directory / "recipe.yml"
    model = _write_model(directory / "model", {"w": (8, 8)}, 0)
    recipe.write_text(f"method: linear\nmodels: [{model.name}]\n")
    command = [sys.executable, "-m", "merganser", "merge", str(recipe), str(directory / "out")]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    if done.returncode:
        raise MerganserError(f"the merge that measures start-up failed: {done.stderr.strip()[-500:]}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def _measure_merging(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], models: int, method: str, kind: str = "elementwise"
) -> tuple[float, Work]:
    """Processor seconds of a merge with one worker, its files in memory; a small one before it has imported all."""
    from merganser.recipes.running import run

    for which, sizes in {"small": {"w": (40, 40)}, "measured": shapes}.items():
        place = directory / which
        base, *others = (str(_write_model(place / f"model{number}", sizes, number)) for number in range(models + 1))
        based = {"models": [base, *others]} if method == "linear" else {"base": base, "models": others}
        before = time.process_time()
        run({"method": method, **based}, place / "out", workers=1)
        seconds = time.process_time() - before
    shutil.rmtree(directory)
    return seconds, merge_of(shapes, models, kind)


def _write_model(directory: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> Path:
    """Write a bfloat16 checkpoint of a base (seed 0), or of a model near it."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    generator = torch.Generator()

    def draw(index: int, shape: tuple[int, ...]) -> Tensor:
        base = torch.randn(shape, generator=generator.manual_seed(index))
        own = torch.randn(shape, generator=generator.manual_seed(1000 * seed + index))
        return (base if seed == 0 else base + 0.01 * own).bfloat16()

    save_file({name: draw(i, shape) for i, (name, shape) in enumerate(shapes.items())}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


def _seconds(function: Callable[[], object]) -> float:
    before = time.perf_counter()
    function()
    return max(time.perf_counter() - before, 1e-9)


def _forget(handle: int) -> None:
    """Ask the system to drop a file from memory; some file systems do not."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
