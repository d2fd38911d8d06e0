"""Proof of origin: lock files, verifying and rebuilding outputs, lineage, uploads. Start at `lock_file.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "family": ("FamilyTree", "trace"),
        "lock_file": ("Ancestor", "LockFile", "read_lock"),
        "pushing": ("Upload", "push"),
        "rebuilding": ("rebuild",),
        "verification": ("Verification", "verify"),
    },
)

if TYPE_CHECKING:
    from merganser.origin.family import FamilyTree as FamilyTree
    from merganser.origin.family import trace as trace
    from merganser.origin.lock_file import Ancestor as Ancestor
    from merganser.origin.lock_file import LockFile as LockFile
    from merganser.origin.lock_file import read_lock as read_lock
    from merganser.origin.pushing import Upload as Upload
    from merganser.origin.pushing import push as push
    from merganser.origin.rebuilding import rebuild as rebuild
    from merganser.origin.verification import Verification as Verification
    from merganser.origin.verification import verify as verify
