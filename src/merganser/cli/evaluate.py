"""`merganser evaluate`: check a merged model and compare it with its parents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from merganser.cli.options import Device, Json, Task
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter
from merganser.report.tables import Table

if TYPE_CHECKING:
    from merganser.evaluate.models import Evaluation


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
    """Check that a model loads, has finite weights and outputs, and generates text; score it and its parents.

    Exits with 1 if the model is broken. Files of questions are JSON lines or tab-separated; see the documentation of
    each kind for its fields.
    """
    from merganser.evaluate import tasks as questions
    from merganser.evaluate.models import evaluate

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
        say(_text(found))
    if found.verdict == "broken":
        raise typer.Exit(1)


def _text(found: Evaluation) -> str:
    checks = Table(("check", "", "finding"), [(c.name, c.status, c.message) for c in found.checks])
    names = list(found.scores.tasks)
    rows = [
        (label, scores.perplexity, *(scores.tasks.get(name) for name in names))
        for label, scores in ((found.path, found.scores), *found.parents.items())
    ]
    lines = [checks.text()]
    if names or found.scores.perplexity is not None:
        lines += ["", Table(("model", "perplexity", *names), rows).text()]
    if found.normalized is not None:
        lines += ["", f"normalised accuracy {found.normalized:.3f} (1 means as good as the best parent on every task)"]
    return "\n".join([*lines, "", f"{found.path} is {found.verdict}"])
