"""The machine a number was measured on, in one line."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = os.cpu_count()
    return f"{model}, {cores} cores, {memory:.0f} GiB, Python {platform.python_version()}, torch {torch.__version__}"
