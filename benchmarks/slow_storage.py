"""Do more workers hide slow storage? Merges with threads, processes and Ray while every read waits.

    python -m benchmarks.slow_storage [--delay 0.2] [--tensors 64] [--workers 1 2 4] [--times 3]

Every read of a tensor sleeps first, as if it came from storage that is slow to answer but answers any number of
requests at a time. The limit is then reads × delay / workers. Prints the ratio of the seconds of `linear` over two
models to that limit: the median of several merges, and the range. The first merge of every kind, and the start of Ray,
are not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_DELAY, _LOG = "MERGANSER_SLOW_READS", "MERGANSER_SLOW_READS_LOG"
KINDS = ("threads", "processes", "Ray")
NAMES = ("a", "b")


def slow_down() -> None:
    """Let every read of a safetensors file in this process and its forks wait, and note it in a file."""
    from merganser.checkpoints.safetensors_file import SafetensorsFile

    read, delay = SafetensorsFile.read_stored, float(os.environ[_DELAY])
    log = os.open(os.environ[_LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def read_late(self: Any, *arguments: Any, **options: Any) -> Any:
        os.write(log, b".")
        time.sleep(delay)
        return read(self, *arguments, **options)

    SafetensorsFile.read_stored = read_late  # type: ignore[method-assign]


def make_models(directory: Path, tensors: int) -> list[str]:
    """Write two models of matrices with 2²⁰ entries."""
    import torch
    from safetensors.torch import save_file

    for seed, name in enumerate(NAMES):
        draw = torch.Generator().manual_seed(seed)
        (directory / name).mkdir()
        matrices = {f"layers.{i}.weight": torch.randn(1024, 1024, generator=draw).bfloat16() for i in range(tensors)}
        save_file(matrices, directory / name / "model.safetensors")
    return [str(directory / name) for name in NAMES]


@contextmanager
def cluster(kind: str, workers: int) -> Iterator[dict[str, Any]]:
    """Yield the options of a merge with workers of a kind; a cluster of Ray lives as long as the context."""
    if kind != "Ray":
        yield {"processes": kind == "processes"}
        return
    import ray

    from merganser.engine.ray_cluster import start_ray

    environment = {
        "worker_process_setup_hook": "benchmarks.slow_storage.slow_down",
        "env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])},
    }
    start_ray("local", workers, log_to_driver=False, runtime_env=environment)
    try:
        yield {"ray": "local"}
    finally:
        ray.shutdown()


def merge(models: list[str], out: Path, log: Path, workers: int, options: dict[str, Any]) -> tuple[float, int]:
    """Return the seconds of a merge and the number of its reads."""
    import merganser as mg

    log.write_bytes(b"")
    began = time.monotonic()
    mg.run(
        {"method": "linear", "models": models},
        out,
        overwrite=True,
        workers=workers,
        changes=False,
        digest="xxh3_128",
        **options,
    )
    return time.monotonic() - began, log.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.2, help="seconds before every read")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        log = place / "reads"
        os.environ |= {_DELAY: str(options.delay), _LOG: str(log)}
        models = make_models(place, options.tensors)
        slow_down()
        for workers in options.workers:
            for kind in options.kinds:
                with cluster(kind, workers) as how:
                    merge(models, place / "out", log, workers, how)
                    runs = [merge(models, place / "out", log, workers, how) for _ in range(options.times)]
                reads = runs[0][1]
                assert {count for _, count in runs} == {reads}, "some merges read more than others"
                assert reads >= len(NAMES) * options.tensors, "some workers are not slowed down"
                limit = reads * options.delay / workers
                ratios = sorted(seconds / limit for seconds, _ in runs)
                print(
                    f"{kind:<9} {workers} worker(s): {statistics.median(ratios):.2f} x the storage's own "
                    f"{limit:.2f} s ({ratios[0]:.2f}-{ratios[-1]:.2f}; {reads} reads)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
