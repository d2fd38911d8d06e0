"""Train every model of the zoo that is missing, the most useful first.

    python -m benchmarks.zoo [--jobs 2] [--cache DIR] [--data DIR]
    python -m benchmarks.zoo --list

Each job is a process of its own on one thread, `--jobs` of them at a time. Kill it at any moment and start it again:
finished models are kept, others go on from their last epoch and end with the same weights. Every job writes to its file
in `logs` of the model directory.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.plan import PLAN, Job


def run(job: Job, cache: Path, data: Path) -> bool:
    """Run one job and return whether it succeeded; one that another process is running counts as done."""
    log = cache / "logs" / f"{job.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{job.name}: another process is training it", flush=True)
            return True
        command = [sys.executable, "-m", f"benchmarks.zoo.{job.program}", *job.options]
        command += ["--cache", str(cache), "--data", str(data)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode == 0
    print(f"{job.name}: {'done' if done else f'failed, see {log}'}", flush=True)
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--list", action="store_true", help="print the plan and train nothing")
    add_locations(parser)
    options = parser.parse_args(arguments)
    if options.list:
        for job in PLAN:
            print(f"{job.minutes:5.0f} min  {job.program} {' '.join(job.options)}")
        print(f"{sum(job.minutes for job in PLAN) / 60:5.1f} h of processor time in all")
        return
    with ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(lambda job: run(job, options.cache, options.data), PLAN))
    if not all(done):
        failed = [job.name for job, success in zip(PLAN, done, strict=True) if not success]
        sys.exit(f"{len(failed)} of {len(PLAN)} jobs failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
