"""`merganser auto`: turn experts and a little data into a merge, or into the advice not to merge."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.interrupts import command as same_command
from merganser.cli.interrupts import explain_interrupt
from merganser.cli.limits import memory_limit
from merganser.cli.naming import name_checkpoints, read_pairs
from merganser.cli.options import Device, Json, Memory, Out, Overwrite, Seed
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter

if TYPE_CHECKING:
    from merganser.tuning.autopilot.decisions import Decision
    from merganser.tuning.autopilot.looking import Remark

#: Rows of the race that a terminal shows; the page shows all of them.
SHOWN = 8


def command(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Checkpoint the experts were fine-tuned from.")],
    experts: Annotated[list[str], typer.Argument(metavar="EXPERT", help="Experts: paths, hub ids or NAME=PATH.")],
    out: Out,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="[NAME=]KIND:FILE",
            help="Questions to select and check merges with; may be repeated. Kinds: see `merganser evaluate`. Without "
            "answers, those of the expert called NAME stand in.",
        ),
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option("--candidate", metavar="METHOD", help="Method to race; may be repeated. Default: a selection."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="LIMIT", help="Limit on the race: questions (5000), time (10m, 1h30m) or both (5000,10m)."
        ),
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="Maximum questions per task for the best candidates.")] = 200,
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK=FILE", help="Answers of other models to a task's questions, to select a better sample."
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    memory: Memory = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Choose how to merge experts, or advise against it.

    Inspects the weights, races methods and scales on a few questions, closes in on the best scale and checks it on
    questions that the race did not use. OUT is written only if a merge beats the best single model on those, beyond a
    95 % interval; otherwise the command exits with 1. Without --data, it writes a default merge and says that no data
    supports it. OUT.auto contains the answers, the recipe and a page about the race. Run the same command again to
    continue after an interruption.
    """
    from merganser.engine.directories import check_absent, check_replaceable, check_writable, paths_in
    from merganser.evaluate.tasks import Task
    from merganser.tuning.autopilot.exams import exam_of_tasks
    from merganser.tuning.autopilot.merges import Merges
    from merganser.tuning.autopilot.pilot import pilot

    named = name_checkpoints(experts)
    check_absent(out, overwrite)
    check_replaceable(out, [path for model in (base, *named.values()) for path in paths_in(model)])
    check_writable(out, out.parent)
    tasks = [Task.parse(text) for text in data or ()]
    limit = memory_limit(memory)
    merges = Merges(base, named, seed, limit)
    beside = out.with_name(f"{out.name}.auto")

    def on_look(remarks: tuple[Remark, ...]) -> None:
        beside.mkdir(parents=True, exist_ok=True)
        for remark in remarks:
            say(f"note: {remark.text}", sys.stderr)

    expected = [0]
    with (
        explain_interrupt(lambda: f"{beside} keeps the answers so far; continue with: {same_command()}"),
        ProgressReporter("racing", "questions") as reporter,
    ):

        def on_answer(label: str, asked: int, total: int) -> None:
            reporter(total, max(total, *expected), label)
            reporter.line(f"{total:8,} asked  +{asked:<5} {label}")

        try:
            decision = pilot(
                merges,
                lambda known: exam_of_tasks(tasks, merges, device, known) if tasks else None,
                methods=candidates,
                budget=budget,
                questions=questions,
                calibration=read_pairs(calibration or (), "TASK=FILE", "--calibration"),
                journal=beside / "answers.jsonl",
                on_answer=on_answer,
                on_look=on_look,
                on_plan=expected.append,
            )
        finally:
            with suppress(OSError):
                beside.rmdir()  # only if it is empty
    _store(decision, beside)
    if decision.recipe is not None:
        _write(decision.recipe, out, overwrite, limit, device)
    if as_json:
        emit(
            {**decision.to_dict(), "path": str(out) if decision.recipe else None, "report": str(beside / "report.html")}
        )
    else:
        _show(decision, out, beside)
    if decision.recipe is None:
        raise typer.Exit(1)


def _store(decision: Decision, beside: Path) -> None:
    """Write the decision, the recipe of the best merge and the page."""
    from merganser.plain import to_yaml
    from merganser.report import autopilots
    from merganser.report.page import Page

    beside.mkdir(parents=True, exist_ok=True)
    found = decision.to_dict()
    autopilots.write(beside, found)
    if decision.best_recipe is not None:
        (beside / "recipe.yml").write_text(to_yaml(decision.best_recipe), encoding="utf-8")
    page = Page(f"Autopilot: {decision.verdict}")
    autopilots.fill_decision(page, found)
    page.write(beside / "report.html")


def _write(recipe: dict[str, Any], out: Path, overwrite: bool, memory: int, device: str) -> None:
    from merganser.recipes.running import run

    partial = out.with_name(f"{out.name}.partial")
    with (
        explain_interrupt(lambda: f"{partial} keeps what is finished; continue with: {same_command()}"),
        ProgressReporter("merging") as reporter,
    ):
        options: dict[str, Any] = {"overwrite": overwrite, "memory": memory, "device": device}
        run(recipe, out, resume=partial.exists(), on_progress=reporter.follow, **options)


def _show(decision: Decision, out: Path, beside: Path) -> None:
    from merganser.report.autopilots import challenge_table, is_mean, race_table, task_table

    found = decision.to_dict()
    if decision.rungs:
        say(f"race, first {SHOWN} of {len(race_table(found).rows)}:\n{race_table(found, SHOWN).text()}\n")
    if decision.challenges:
        say(f"on unseen questions:\n{challenge_table(found).text()}\n")
    if is_mean(found):
        say(f"by task, of which the score is the mean:\n{task_table(found).text()}\n")
    say(f"{decision.text}.")
    if decision.recipe is not None:
        say(f"wrote {out}")
    elif decision.best_recipe is not None:
        say(f"to merge anyway: merganser merge {beside / 'recipe.yml'} {out}")
    say(f"wrote {beside / 'report.html'}")
