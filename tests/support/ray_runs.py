"""Scripts that start a Ray cluster, in a process of their own: Ray takes down the one it runs in when it is unhappy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest


def exposed_addresses() -> set[str]:
    """Return the addresses other than this machine's own on which this process and its children listen.

    Raises:
        AssertionError: If they listen nowhere: then there is no cluster to look at.
    """
    listening: set[str] = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        listening.update(c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN)
    assert listening, "no cluster listens anywhere"
    return {address for address in listening if address.rpartition(":")[2] not in ("127.0.0.1", "1")}


def run_with_ray(script: str, *arguments: str, modules: Path) -> None:
    """Run a script that starts Ray; it finds the test modules in `modules`, as its workers do."""
    paths = os.pathsep.join([str(modules), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    for _ in range(3):
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        if "timed out during startup" not in done.stderr:
            assert done.returncode == 0, done.stderr[-3000:]
            return
    pytest.skip("Ray gives its daemons 30 seconds to start; this machine is too busy for that")
