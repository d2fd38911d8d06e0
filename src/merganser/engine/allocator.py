"""How this process gives memory back to the system."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_KEPT = 64 << 20
_LARGE = 4 << 20


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB a thread of what is freed instead of returning it at once.

    Blocks of a megabyte come and go by the ten thousand: returned each time, they cost their page faults again,
    about a tenth of a merge. Larger tensors still go back. This holds for the whole process, so only commands do it;
    other C libraries are left alone.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_TOP_PAD, _LARGE)
