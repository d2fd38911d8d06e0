"""`merganser evaluate`: check a merged model and compare it with its parents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from merganser.cli.options import Device, Html, Json, Task
from merganser.cli.output import emit, say, wrap
from merganser.cli.progress import ProgressReporter


def command(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="Checkpoint directory, file or hub id.")],
    parents: Annotated[
        list[str] | None,
        typer.Option(
            "--parent", metavar="CKPT", help="Model it was made from; may be repeated. Default: as its lock file says."
        ),
    ] = None,
    tasks: Task = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions per task, drawn at random; default: all.")] = None,
    html: Html = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Check that a model works, and score it.

    It must load, have finite weights and outputs, and generate text. Its parents are scored beside it.

    Exits with 1 if the model is broken. Files of questions are JSON lines or tab-separated; see the documentation of
    each kind for its fields.
    """
    from merganser.evaluate import tasks as questions
    from merganser.evaluate.models import evaluate, find_recorded_parents
    from merganser.report.evaluations import fill, remarks, tables

    if html is not None:
        from merganser.engine.directories import check_file

        check_file(html, "--html")
    asked = [questions.Task.parse(text) for text in tasks or ()]
    parents = parents or find_recorded_parents(Path(checkpoint))
    steps = 1 + (1 + len(parents)) * (2 + len(asked))  # of each model: loading, perplexity, tasks
    with ProgressReporter("evaluating", "steps") as reporter:
        found = evaluate(
            checkpoint,
            parents,
            asked,
            limit=limit,
            device=device,
            on_step=lambda step: reporter.step(step, steps),
        )
    if as_json:
        emit(found.to_dict())
    else:
        say("\n\n".join([*(table.text() for table in tables(found)), *map(wrap, remarks(found))]))
    if html is not None:
        from merganser.report.page import Page

        page = Page(f"Evaluation of {found.path}", "\n\n".join(f"{line}." for line in reversed(remarks(found))))
        fill(page, found)
        page.write(html)
        if not as_json:
            say(f"\nwrote {html}")
    if found.verdict == "broken":
        raise typer.Exit(1)
