"""What the system grants a command: as many open files as it may have."""

from __future__ import annotations

import contextlib
import sys

#: Where the system names no limit, more than this is refused by some (macOS).
_ENOUGH = 10240


def raise_open_files() -> None:
    """Every mapped shard and every file that is written stays open: the usual limit of 1024 is few for large models."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, _ENOUGH) if hard == resource.RLIM_INFINITY else hard
    if soft not in (wanted, resource.RLIM_INFINITY):
        with contextlib.suppress(ValueError, OSError):  # the system has the last word
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
