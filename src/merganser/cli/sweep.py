"""`merganser sweep`: vary values of a recipe, merge every variant in memory and score it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.interrupts import command as same_command
from merganser.cli.interrupts import explain_interrupt
from merganser.cli.options import Device, Json, Task
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter

if TYPE_CHECKING:
    from merganser.recipes.schema import Recipe
    from merganser.tuning.sweep import Sweep, Variant, VariantScore


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML).")],
    over: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE,VALUE…", help="Values to try for a parameter, method or seed; may be repeated."
        ),
    ],
    tasks: Task = None,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Function (weights, budget) -> score of a variant, instead of tasks."
        ),
    ] = None,
    rungs: Annotated[
        list[int] | None,
        typer.Option(
            "--rung",
            min=1,
            help="Questions of each task on a rung; repeat for successive halving. Default: 100 (or all).",
        ),
    ] = None,
    keep: Annotated[float, typer.Option(min=0, max=1, help="Share of the variants that reach the next rung.")] = 0.5,
    journal: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Journal of scores; default: RECIPE with suffix .sweep.jsonl.")
    ] = None,
    best: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the best recipe to this file.")] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Score many variants of a recipe.

    Scores all, or halves them from rung to rung. Interrupted sweeps continue where they stopped.

    Only the scores are written; merge the best recipe with `merganser merge`.
    """
    from merganser.errors import InputError
    from merganser.evaluate.search import rung_sizes
    from merganser.tuning.sweep import TaskScore, parse_over, sweep

    if bool(tasks) == bool(score):
        raise InputError("choose how to score: give either --task or --score")
    if best is not None:
        _check_place(best, recipe)

    axes, budgets = parse_over(over), rungs or [100]
    scored = _score_variant(score) if score else _on_tasks(recipe, tasks or [], device)
    if isinstance(scored, TaskScore):
        budgets = scored.limit(budgets)
    total = sum(rung_sizes(math.prod(map(len, axes.values())), len(budgets), keep))
    scores = journal or recipe.with_suffix(".sweep.jsonl")
    with (
        explain_interrupt(lambda: f"{scores} keeps the scores so far; continue with: {same_command()}"),
        ProgressReporter("scoring", "scores") as reporter,
    ):
        count = itertools.count(1)

        def on_score(variant: Variant, budget: int, value: float) -> None:
            reporter.line(f"{value:10.4f}  {variant.label} (on {budget})")
            reporter(next(count), total)

        found = sweep(
            recipe,
            axes,
            scored,
            budgets=budgets,
            keep=keep,
            journal=scores,
            scored_by=score or f"a sample of {' '.join(sorted(tasks or []))}",
            on_score=on_score,
        )
    if best is not None:
        from merganser.plain import to_yaml

        best.write_text(to_yaml(found.recipe), encoding="utf-8")
    if as_json:
        emit(found.to_dict())
    else:
        say(_text(found))
        if best is not None:
            say(f"wrote {best}")


def _check_place(best: Path, recipe: Path) -> None:
    """Check that the best recipe finds the same models from its place: its relative paths start at its directory."""
    from merganser import recipes
    from merganser.engine.directories import check_file
    from merganser.errors import InputError, MerganserError

    check_file(best, "--best")
    if best.exists() and recipe.exists() and best.samefile(recipe):
        raise InputError(f"--best {best}: is the recipe itself; choose another file")
    if best.parent.resolve() == recipe.parent.resolve():
        return
    try:
        there = _models(recipes.load(recipe.read_text(encoding="utf-8"), best.parent))
    except MerganserError:
        there = None
    if there != _models(recipes.load(recipe)):
        raise InputError(f"--best {best}: the models of {recipe} cannot be found from there; write it beside {recipe}")


def _models(recipe: Recipe) -> list[Path]:
    from merganser import recipes

    return [Path(model.path).resolve() for model in recipes.plan(recipe).models if model.path is not None]


def _score_variant(reference: str) -> VariantScore:
    from merganser.evaluate.references import import_function

    function: Any = import_function(reference, "--score")
    return lambda variant, budget: float(function(variant.weights(), budget))


def _on_tasks(recipe: Path, tasks: list[str], device: str) -> VariantScore:
    """Return a score on tasks, computed with one live module of the recipe's template."""
    from merganser import recipes
    from merganser.errors import InputError
    from merganser.evaluate import language
    from merganser.evaluate import tasks as questions
    from merganser.tuning.sweep import TaskScore

    asked = [questions.Task.parse(text) for text in tasks]
    directory = recipes.prepare(recipes.load(recipe)).sources[0].directory
    kind = language.kind_of_model(directory)
    if directory is None or kind is None:
        raise InputError(f"{recipe}: tasks need models that transformers can load; use --score for others")
    return TaskScore(language.load(directory, kind, device).module, asked, str(directory))


def _text(found: Sweep) -> str:
    from merganser.report.sweeps import variant_table

    text = variant_table((trial.score, trial.budget, trial.values) for trial in found.trials).text()
    first = found.trials[0]
    level = sum((trial.budget, trial.score) == (first.budget, first.score) for trial in found.trials)
    if level > 1:
        text += f"\n\n{level} variants share the best score; the first is taken. More questions may tell them apart."
    return text if found.unseen is None else f"{text}\n\nscore of the best on unseen questions: {found.unseen:.4f}"
