"""The free disk and memory of the machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def free_memory() -> tuple[int, int]:
    """Return the bytes of memory that are available, and all there are."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        return sizes["MemAvailable"], sizes["MemTotal"]
    except (OSError, KeyError, ValueError):
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages, pages


def describe_machine(directory: Path) -> dict[str, int]:
    """Return free and total bytes of the disk under a directory, and of memory, and the number of cores."""
    disk = shutil.disk_usage(directory)
    available, total = free_memory()
    return {
        "disk_free": disk.free,
        "disk_total": disk.total,
        "memory_free": available,
        "memory_total": total,
        "cores": os.cpu_count() or 1,
    }
