"""`merganser evaluate`: is a merged model sound, and how does it compare with its parents."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from merganser.cli.output import emit, say
from merganser.report.tables import Table

if TYPE_CHECKING:
    from merganser.evaluate.models import Evaluation


def command(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="Checkpoint directory, file or hub id.")],
    parents: Annotated[list[str] | None, typer.Option(help="A model it was made from; may be repeated.")] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="[name=]kind:file; kinds: classification, multiple-choice, choice, generation, exact-match, "
            "perplexity."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions asked of each task, drawn at random; default: all.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run the models: cpu, cuda …")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Check that a model loads, that its weights and outputs are finite and that it speaks; score it and its parents.

    Exits with 1 if the model is broken. Files of questions are JSON lines or tab-separated; see the documentation of
    each kind for its fields.
    """
    from merganser.evaluate.models import evaluate
    from merganser.evaluate.tasks import Task

    found = evaluate(
        checkpoint,
        parents or (),
        [Task.parse(text) for text in tasks or ()],
        limit=limit,
        device=device,
        on_step=lambda step: say(step, sys.stderr),
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
        lines += ["", f"normalised accuracy {found.normalized:.3f} (1 is the best parent at every task)"]
    return "\n".join([*lines, "", f"{found.path} is {found.verdict}"])
