"""Write a checkpoint from the command line: the plan, progress, Ctrl-C and the last line, alike in every command."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from merganser.cli.interrupts import explain_interrupt, explain_resume
from merganser.cli.limits import memory_limit
from merganser.cli.options import DryRun, Json, Memory, Overwrite, Resume, Workers
from merganser.cli.output import emit, say
from merganser.cli.plan import show_merge
from merganser.cli.progress import ProgressReporter
from merganser.units import show_time

if TYPE_CHECKING:
    from merganser.checkpoints.base import Checkpoint
    from merganser.engine.merge import Merge


@contextmanager
def writing(out: Path, doing: str, as_json: bool, made: str = "made from these models in this way") -> Iterator[Any]:
    """Show the progress of writing `out`, explain Ctrl-C, and say at the end what was written.

    Yields the arguments of `run` and `save` that report progress, and that `made` says how `out` was made if it was
    there already.
    """
    place, complete = Path(os.path.expanduser(out)), list[Path]()
    partial = place.with_name(f"{place.name}.partial") if place.name else place
    began = time.monotonic()
    with explain_interrupt(lambda: explain_resume(partial)), ProgressReporter(doing, as_json=as_json) as reporter:
        yield {"on_progress": reporter.follow, "on_complete": complete.append}
    seconds = time.monotonic() - began
    if as_json:
        emit({"event": "done", "path": str(place), "seconds": round(seconds, 3), "already_complete": bool(complete)})
    elif complete:
        say(f"{place} was already {made}; nothing to do")
    else:
        say(f"wrote {place} in {show_time(seconds)}")


@dataclass(frozen=True)
class WriteOptions:
    """The options of every command that writes a view."""

    dry_run: DryRun = False
    resume: Resume = False
    overwrite: Overwrite = False
    memory: Memory = None
    workers: Workers = None
    as_json: Json = False


def writes_view(make: Callable[..., Any]) -> Callable[..., None]:
    """Turn a function that returns a view into a command that writes it to OUT, with the options of `WriteOptions`.

    The function may ask for them as `options`, its last argument, and has `dtype` if the view can have another.
    """
    own = inspect.signature(make, eval_str=True)
    hints = get_type_hints(WriteOptions, include_extras=True)

    @wraps(make)
    def command(**given: Any) -> None:
        from merganser.engine.publishing import check_out

        options = WriteOptions(**{name: given.pop(name) for name in hints})
        if not (options.dry_run or options.resume):
            check_out(given["out"], options.overwrite)  # before the view, which may take long to compute
        view = make(**given, **({"options": options} if "options" in own.parameters else {}))
        _write(view, given["out"], given.get("dtype"), options)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(WriteOptions, name), annotation=hint)
        for name, hint in hints.items()
    ]
    kept = [parameter for name, parameter in own.parameters.items() if name != "options"]
    vars(command)["__signature__"] = own.replace(parameters=[*kept, *added])
    return command


def _write(view: Checkpoint, out: Path, dtype: str | None, options: WriteOptions) -> None:
    """Show what a view will compute, and write it unless this is a dry run."""
    from merganser.recipes.saving import prepare_copy, save

    def show(merge: Merge) -> None:
        show_merge(merge, options.memory, options.workers, options.as_json)

    if options.dry_run:
        show(prepare_copy(view, dtype)[0])
        return
    with writing(out, "writing", options.as_json) as reporting:
        save(
            view,
            out,
            dtype=dtype,
            resume=options.resume,
            overwrite=options.overwrite,
            workers=options.workers,
            memory=memory_limit(options.memory),
            on_merge=show,
            **reporting,
        )
