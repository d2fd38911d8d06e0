"""A small merge to be interrupted, and what must be true afterwards."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from crash.faults import Counting
from merganser.engine.compute import Arithmetic
from merganser.engine.disk import Disk
from merganser.engine.export import Execution, write_merge
from merganser.engine.merge import Merge
from merganser.engine.writer import Destination
from support.plans import make_plan, random_models

_SMALL = ("row", "bias", "scalar", "empty", "steps")
MODELS, OTHERS = ([{name: model[name] for name in _SMALL} for model in random_models(2, seed=seed)] for seed in (0, 1))


def merge(
    out: Path,
    disk: Disk | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    others: bool = False,
    digest: str | None = None,
) -> Path:
    """Merge two small models into two shards, journalling after every tensor."""
    small = Merge(*make_plan(OTHERS if others else MODELS, "linear", shard_size=1200))
    return write_merge(
        small,
        Destination(out, resume, overwrite, disk=disk or Counting(), sync_seconds=0),
        Execution(Arithmetic(digest=digest), workers=1),
    )


def digest(out: Path) -> str:
    """Of the names and bytes of all files of a directory."""
    files = sorted(path for path in out.iterdir())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def make_old(out: Path) -> None:
    """Something to be replaced."""
    out.mkdir()
    (out / "old").write_text("old")


def is_old(out: Path) -> bool:
    return out.is_dir() and os.listdir(out) == ["old"]


def wrong(out: Path, expected: str, replace: bool) -> str:
    """What must not be after a crash, before anybody resumes: a name without the whole thing, or the old thing lost."""
    moved = out.with_name(f"{out.name}.partial") / "replaced"
    if out.exists() and not (is_old(out) or digest(out) == expected):
        return "OUT is neither the old one nor the new one"
    if replace and not (is_old(out) or is_old(moved) or (out.exists() and digest(out) == expected)):
        return "the old one is lost and the new one is not there"
    if not replace and is_old(out):
        return "something came from nowhere"
    return ""


def strays(directory: Path) -> list[str]:
    """What is left in a directory besides results."""
    return sorted(path.name for path in directory.iterdir() if ".partial" in path.name or path.name.startswith("."))
