"""Files that may be missing, damaged, half written or locked."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from merganser.strict_json import read_json


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_locked(lock: Path) -> bool:
    """Return whether a living process holds a lock; the system releases the locks of killed processes."""
    try:
        handle = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # some file systems have no locks
        return isinstance(error, BlockingIOError)
    finally:
        os.close(handle)
    return False
