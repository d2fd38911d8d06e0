"""Write a checkpoint that is computed while it is read, with a plan and progress."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from merganser.cli.interrupts import explain_interrupt, left_in
from merganser.cli.output import emit, say
from merganser.cli.plan import show_summary, summarise
from merganser.cli.progress import ProgressReporter
from merganser.units import parse_size, show_time

if TYPE_CHECKING:
    from merganser.checkpoints.base import Checkpoint


def write_view(
    view: Checkpoint,
    out: Path,
    dtype: str | None,
    dry_run: bool,
    resume: bool,
    overwrite: bool,
    memory: str | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Show what a view will compute, and write it unless this is a dry run."""
    from merganser.engine.execute import DEFAULT_MEMORY
    from merganser.recipes.saving import prepare_copy, save

    limit = parse_size(memory) if memory else DEFAULT_MEMORY
    began = time.monotonic()
    show_summary(summarise(prepare_copy(view)[0], limit, workers, strict=memory is not None), as_json)
    if dry_run:
        return
    complete: list[Path] = []
    with (
        explain_interrupt(lambda: left_in(out.with_name(f"{out.name}.partial"))),
        ProgressReporter("writing", as_json=as_json) as reporter,
    ):
        save(
            view,
            out,
            dtype=dtype,
            resume=resume,
            overwrite=overwrite,
            workers=workers,
            memory=limit,
            on_progress=reporter.follow,
            on_complete=complete.append,
        )
    seconds = time.monotonic() - began
    if as_json:
        emit({"event": "done", "path": str(out), "seconds": round(seconds, 3), "already_complete": bool(complete)})
    elif complete:
        say(f"{out} was already made from these models in this way; nothing to do")
    else:
        say(f"wrote {out} in {show_time(seconds)}")
