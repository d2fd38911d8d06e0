"""How glibc returns freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_KEPT = 64 << 20
_LARGE = 4 << 20


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory per thread instead of returning it at once.

    A merge frees tens of thousands of blocks of a megabyte. Returning each to the system costs its page faults again,
    about a tenth of a merge. Larger tensors are still returned. The setting holds for the whole process, so only
    commands use it; other C libraries are not affected.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_TOP_PAD, _LARGE)
