"""Proof of origin: lock files, verifying and rebuilding outputs, lineage, uploads. Start at `lock_file.py`."""

from merganser.origin.family import FamilyTree, trace
from merganser.origin.lock_file import Ancestor, LockFile, read_lock
from merganser.origin.pushing import Upload, push
from merganser.origin.rebuilding import rebuild
from merganser.origin.verification import Verification, verify

__all__ = [
    "Ancestor",
    "FamilyTree",
    "LockFile",
    "Upload",
    "Verification",
    "push",
    "read_lock",
    "rebuild",
    "trace",
    "verify",
]
