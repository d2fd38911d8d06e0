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


def run(directory: Path) -> int:
    """Run the command of a job to its end and record how it ended.

    Args:
        directory: The directory of the job.

    Returns:
        The exit code of the command.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the command, which reports what it leaves behind
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
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
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        code = command.wait()
    ended = directory / "exit.json.new"
    ended.write_text(json.dumps({"code": code, "seconds": round(time.time() - began, 3)}), encoding="utf-8")
    ended.replace(directory / "exit.json")
    return code


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
