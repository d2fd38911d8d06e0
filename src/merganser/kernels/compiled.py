"""Load the compiled libraries of this package, which are built if there is a C compiler at installation."""

from __future__ import annotations

import ctypes
from pathlib import Path


def load_library(name: str, version: int) -> ctypes.CDLL | None:
    """Return the compiled library `_name`, or None if it was not built, cannot be loaded or has another version.

    Args:
        name: The name of its C file. The library gives its version in the symbol `name_version`.
        version: The version that the caller speaks to; another was built from older sources.
    """
    for path in sorted(Path(__file__).parent.glob(f"_{name}.*")):
        try:
            loaded = ctypes.CDLL(str(path))
            if ctypes.c_int.in_dll(loaded, f"{name}_version").value == version:
                return loaded
        except (OSError, ValueError):
            continue
    return None
