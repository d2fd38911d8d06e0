"""Limits of a command: memory, and open files."""

from __future__ import annotations

import contextlib
import sys

from merganser.units import parse_size

#: Where the system reports no limit, some systems (macOS) refuse more than this.
_ENOUGH = 10240


def raise_open_files() -> None:
    """Raise the soft limit on open files: every mapped shard and every written file stays open, and 1024 is too few."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, _ENOUGH) if hard == resource.RLIM_INFINITY else hard
    if soft not in (wanted, resource.RLIM_INFINITY):
        with contextlib.suppress(ValueError, OSError):  # the system may refuse
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def memory_limit(given: str | None) -> int:
    """Return the bytes of `--memory`, or the default."""
    from merganser.engine.workers import DEFAULT_MEMORY

    return parse_size(given) if given else DEFAULT_MEMORY
