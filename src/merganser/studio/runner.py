"""The process that runs a job and outlives the server: `python -m merganser.studio.runner DIR`.

A job's directory holds `job.json` (what to run), `events.jsonl` (the command's standard output), `log.txt` (its
standard error), `lock` (held while the job runs) and `exit.json` (how it ended).
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from merganser.strict_json import read_json

#: The exit code of commands that Ctrl-C has stopped, and of jobs that were cancelled before their command started.
CANCELLED = 130


def run(directory: Path) -> int:
    """Run the command of a job to its end and record how it ended.

    Args:
        directory: The directory of the job.

    Returns:
        The exit code of the command.
    """
    interrupts: list[int] = []  # meant for the command, which reports what it leaves behind
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if (directory / "cancelled").exists():
        return _record(directory, CANCELLED, 0.0)
    job = read_json(directory / "job.json")
    began = time.time()
    with (
        open(directory / job["stdin"] if job.get("stdin") else os.devnull, "rb") as given,
        (directory / "events.jsonl").open("ab") as events,
        (directory / "log.txt").open("ab") as log,
    ):
        command = subprocess.Popen(
            [sys.executable, "-m", "merganser", *job["arguments"]],
            cwd=job["cwd"],
            stdin=given,
            stdout=events,
            stderr=log,
        )
        if interrupts:  # they came while the command was being started, which may not have seen them
            command.send_signal(signal.SIGINT)
        code = command.wait()
    return _record(directory, code, time.time() - began)


def _record(directory: Path, code: int, seconds: float) -> int:
    """Write how a job ended, as a whole file or none, and return its exit code."""
    ended = directory / "exit.json.new"
    ended.write_text(json.dumps({"code": code, "seconds": round(seconds, 3)}), encoding="utf-8")
    ended.replace(directory / "exit.json")
    return code


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
