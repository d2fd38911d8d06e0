"""`merganser merge`: a recipe in, a checkpoint out."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.interrupts import explain_interrupt, left_in
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter
from merganser.units import parse_size, show_size, show_time

if TYPE_CHECKING:
    from merganser.engine.merge import Merge


def command(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML), native or mergekit's; - reads standard input.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to be made.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; reads headers only.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a merge that was interrupted; no work if OUT is complete.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT, or an unfinished merge.")] = False,
    memory: Annotated[str | None, typer.Option(help="Bound on tensors in flight, e.g. 2GiB (the default).")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers; default: one per core.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Run on the Ray cluster at this address ('auto' finds one); 'local' starts one here."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1 …")] = "cpu",
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Go on when an input contains NaN.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")] = False,
) -> None:
    """Merge checkpoints as a recipe says.

    Everything wrong with the recipe or the checkpoints is said before any weight is read. An interrupted merge
    continues with --resume and gives the same bytes; OUT appears only when it is complete.
    """
    from merganser.engine.allocator import keep_freed_memory
    from merganser.engine.execute import DEFAULT_MEMORY, Progress
    from merganser.recipes.running import check_workers, run

    keep_freed_memory()
    gc.freeze()  # what torch's import left need not be searched again and again while a plan of many tensors is made
    limit = parse_size(memory) if memory else DEFAULT_MEMORY
    if dry_run:
        check_workers(workers, device)
        _show(_summary(recipe, limit, workers, strict=memory is not None), as_json)
        return
    began = time.monotonic()

    def on_merge(merge: Merge) -> None:
        _show(_summary_of(merge, limit, workers, strict=memory is not None), as_json)

    complete: list[Path] = []
    partial = out.with_name(f"{out.name}.partial") if out.name else out
    with explain_interrupt(lambda: left_in(partial)), ProgressReporter(as_json) as reporter:

        def on_progress(progress: Progress) -> None:
            reporter(progress.done, progress.total, progress.name)

        path = run(
            recipe,
            out,
            resume=resume,
            overwrite=overwrite,
            workers=workers,
            memory=limit,
            device=device,
            allow_nan=allow_nan,
            ray=ray,
            processes=True,
            on_merge=on_merge,
            on_progress=on_progress,
            on_complete=complete.append,
        )
    seconds = time.monotonic() - began
    if as_json:
        emit({"event": "done", "path": str(path), "seconds": round(seconds, 3), "already_complete": bool(complete)})
    elif complete:
        say(f"{path} is complete already, made by this recipe from these models: nothing to do")
    else:
        say(f"wrote {path} in {show_time(seconds)}")


def _summary(recipe: Path, memory: int, workers: int | None, strict: bool) -> dict[str, Any]:
    from merganser import recipes
    from merganser.checkpoints.sidecars import prepare_sidecars

    merge = recipes.prepare(recipes.load(recipe))
    prepare_sidecars(merge.plan.sidecars, merge.sources)  # for what may be wrong with them
    return _summary_of(merge, memory, workers, strict)


def _summary_of(merge: Merge, memory: int, workers: int | None, strict: bool) -> dict[str, Any]:
    from merganser.engine.execute import memory_bound
    from merganser.engine.layout import lay_out
    from merganser.errors import InputError

    plan, sources = merge.plan, merge.sources
    bound = memory_bound(merge, workers or os.cpu_count() or 1, memory)
    if strict and bound > memory:
        raise InputError(f"--memory {show_size(memory)}: one tensor alone needs {show_size(bound)} with its method")
    methods: dict[str, int] = {}
    read = 0
    for output in plan.outputs:
        methods[output.method] = methods.get(output.method, 0) + 1
        for source in (*output.inputs, *([output.base] if output.base else [])):
            read += sources[source.model].spec(source.name).nbytes
    return {
        "event": "plan",
        "models": [model.label for model in plan.models],
        "tensors": len(plan.outputs),
        "methods": methods,
        "bytes_in": read,
        "bytes_out": plan.bytes_out,
        "shards": len(lay_out(plan)),
        "memory_bound": bound,
        "notes": list(plan.notes),
    }


def _show(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(summary)
        return
    methods = ", ".join(f"{name} × {count}" for name, count in sorted(summary["methods"].items()))
    for label, value in (
        ("models", "\n         ".join(summary["models"])),
        ("tensors", f"{summary['tensors']}: {methods}"),
        ("reads", show_size(summary["bytes_in"])),
        ("writes", f"{show_size(summary['bytes_out'])} in {summary['shards']} file(s)"),
        ("memory", f"at most {show_size(summary['memory_bound'])} besides mapped files"),
        *(("note", note) for note in summary["notes"]),
    ):
        say(f"{label:<8} {value}")
