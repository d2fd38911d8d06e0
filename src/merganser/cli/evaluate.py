"""`merganser evaluate`: check a merged model and compare it with its parents."""

from __future__ import annotations

from typing import Annotated

import typer

from merganser.cli.options import Device, Json, Task
from merganser.cli.output import emit, say
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
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Check that a model works, and score it.

    It must load, have finite weights and outputs, and generate text. Its parents are scored beside it.

    Exits with 1 if the model is broken. Files of questions are JSON lines or tab-separated; see the documentation of
    each kind for its fields.
    """
    from merganser.evaluate import tasks as questions
    from merganser.evaluate.models import evaluate
    from merganser.report.evaluations import remarks, tables

    asked = [questions.Task.parse(text) for text in tasks or ()]
    steps = 1 + (1 + len(parents or ())) * (2 + len(asked))  # of each model: loading, perplexity, tasks
    with ProgressReporter("evaluating", "steps") as reporter:
        found = evaluate(
            checkpoint,
            parents or (),
            asked,
            limit=limit,
            device=device,
            on_step=lambda step: reporter.step(step, steps),
        )
    if as_json:
        emit(found.to_dict())
    else:
        say("\n\n".join([*(table.text() for table in tables(found)), *remarks(found)]))
    if found.verdict == "broken":
        raise typer.Exit(1)
