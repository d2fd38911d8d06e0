"""`merganser verify`: check an output against its lock file, and rebuild it from its sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from merganser.cli.limits import memory_limit
from merganser.cli.naming import read_pairs
from merganser.cli.options import Json, Made, Memory, Root, Workers
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter
from merganser.units import show_size

if TYPE_CHECKING:
    from merganser.origin import Verification


def command(
    directory: Made,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Also recompute tensors from the sources and compare every bit.")
    ] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", min=1, help="Number of tensors to rebuild, drawn at random; default: all.")
    ] = None,
    moved: Annotated[
        list[str] | None,
        typer.Option("--moved", metavar="MODEL=PATH", help="Where a model of the recipe is now; may be repeated."),
    ] = None,
    root: Root = None,
    memory: Memory = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Check the bytes of a merged model by its lock file.

    With --rebuild, also merges tensors again from the sources with the recipe in the lock file, compares them bit by
    bit, and compares the sources with the bytes that were merged. Nothing is written.
    """
    from merganser import origin
    from merganser.errors import InputError, MerganserError

    if not rebuild and (sample is not None or moved or root is not None):
        raise InputError("--sample, --moved and --relative-to need --rebuild")
    sources = read_pairs(moved or (), "MODEL=PATH, a model as the recipe names it and where it is now", "--moved")
    limit = memory_limit(memory)
    with ProgressReporter("comparing", as_json=as_json) as reporter:
        found = origin.verify(directory, workers=workers, on_progress=reporter)
    _show("verified", found, as_json)
    problems = list(found.problems)
    if rebuild and not problems:
        with ProgressReporter("rebuilding", as_json=as_json) as reporter:
            found = origin.rebuild(
                directory,
                root=root,
                sources=sources,
                sample=sample,
                workers=workers,
                memory=limit,
                on_progress=reporter.follow,
            )
        _show("rebuilt", found, as_json)
        problems += found.problems
    if problems:
        counted = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise MerganserError(f"{directory} differs from its lock file: {counted}, listed above")


def _show(event: str, found: Verification, as_json: bool) -> None:
    if as_json:
        emit({"event": event} | vars(found))
        return
    for problem in found.problems:
        say(f"wrong    {problem}")
    for note in found.notes:
        say(f"note     {note}")
    if not found.problems:
        what = "as in the lock file" if event == "verified" else "rebuilt from the sources, identical to the last bit"
        say(f"{event:<8} {found.tensors} tensors, {show_size(found.bytes)}: {what}")
