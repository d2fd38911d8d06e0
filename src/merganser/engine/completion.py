"""Detect whether a directory is the finished result of a plan, for `resume`."""

from __future__ import annotations

from pathlib import Path

from merganser.engine.layout import Shard, lay_out
from merganser.engine.plan import Plan
from merganser.engine.source_files import SourceFiles


def is_complete(out: Path, plan: Plan, identity: str, sources: SourceFiles) -> bool:
    """Return whether `out` was made by this plan from these sources.

    Its card has the fingerprint, its files have the headers and sizes of the plan, and no source was written since. A
    directory gets its name only when it is complete, so nothing else needs checking.
    """
    single = plan.sidecars.single  # a single file has the fingerprint in its header, and no card
    try:
        card = "" if single else (out / "README.md").read_text(encoding="utf-8")
        latest = max((state[2] for state in sources.states), default=0)
        made = all(_is_written(out if single else out / shard.file, shard, latest) for shard in lay_out(plan))
    except (OSError, UnicodeDecodeError):
        return False
    return made and (single or f"`{identity}`" in card.splitlines()[-1])


def _is_written(path: Path, shard: Shard, latest: int) -> bool:
    state = path.stat()
    if state.st_size != shard.size or state.st_mtime_ns < latest:
        return False
    with path.open("rb") as file:
        return file.read(len(shard.header)) == shard.header
