"""`merganser sweep`: a recipe's values varied, every variant merged in memory and scored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.interrupts import command as same_command
from merganser.cli.interrupts import explain_interrupt
from merganser.cli.output import emit, say
from merganser.report.tables import Table

if TYPE_CHECKING:
    from merganser.recipes.schema import Recipe
    from merganser.tuning.sweep import Score, Sweep, Variant


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML).")],
    over: Annotated[list[str], typer.Option(help="parameter=value,value,… (or method=…, seed=…); may be repeated.")],
    tasks: Annotated[list[str] | None, typer.Option(help="[name=]kind:file, as in `merganser evaluate`.")] = None,
    score: Annotated[
        str | None, typer.Option(help="Instead of tasks: package.module:function(weights, budget).")
    ] = None,
    budgets: Annotated[str, typer.Option(help="Questions for each rung, e.g. 50,200,1000 halves twice.")] = "100",
    keep: Annotated[float, typer.Option(min=0, max=1, help="Share of the variants that reach the next rung.")] = 0.5,
    journal: Annotated[Path | None, typer.Option(help="Scores so far; default: beside RECIPE, .sweep.jsonl.")] = None,
    best: Annotated[Path | None, typer.Option(help="Write the best recipe to this file.")] = None,
    device: Annotated[str, typer.Option(help="Where to run the models: cpu, cuda …")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Try a grid of values, or halve it from rung to rung; interrupted sweeps go on where they stopped.

    Nothing is written but the scores: run the best recipe with `merganser merge`.
    """
    from merganser.errors import InputError
    from merganser.tuning.sweep import parse_over, sweep

    try:
        rungs = [int(part) for part in budgets.split(",")]
    except ValueError:
        raise InputError(f"--budgets {budgets}: expected whole numbers, e.g. 50,200") from None
    if bool(tasks) == bool(score):
        raise InputError("say how to score: either --tasks or --score")
    if best is not None:
        _check_place(best, recipe)

    def on_score(variant: Variant, budget: int, value: float) -> None:
        say(f"{value:10.4f}  {variant.label} (on {budget})", sys.stderr)

    scores = journal or recipe.with_suffix(".sweep.jsonl")
    with explain_interrupt(lambda: f"{scores} keeps the scores so far; go on with: {same_command()}"):
        found = sweep(
            recipe,
            parse_over(over),
            _scored(score) if score else _on_tasks(recipe, tasks or [], device),
            budgets=rungs,
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


def _check_place(best: Path, recipe: Path) -> None:
    """Relative paths of a recipe are looked for beside it: the best one must find the same models from its place."""
    from merganser import recipes
    from merganser.errors import InputError, MerganserError

    if not best.parent.is_dir():
        raise InputError(f"--best {best}: no directory {best.parent}")
    if best.exists() and recipe.exists() and best.samefile(recipe):
        raise InputError(f"--best {best}: is the recipe itself; choose another file")
    if best.parent.resolve() == recipe.parent.resolve():
        return
    try:
        there = _models(recipes.load(recipe.read_text(encoding="utf-8"), best.parent))
    except MerganserError:
        there = None
    if there != _models(recipes.load(recipe)):
        raise InputError(f"--best {best}: the models of {recipe} are not found from there; write it beside {recipe}")


def _models(recipe: Recipe) -> list[Path]:
    from merganser import recipes

    return [Path(model.path).resolve() for model in recipes.plan(recipe).models if model.path is not None]


def _scored(reference: str) -> Score:
    from merganser.evaluate.references import imported

    function: Any = imported(reference, "--score")
    return lambda variant, budget: float(function(variant.weights(), budget))


def _on_tasks(recipe: Path, tasks: list[str], device: str) -> Score:
    """A live module of the recipe's template, loaded once."""
    from merganser import recipes
    from merganser.errors import InputError
    from merganser.evaluate import language
    from merganser.evaluate.tasks import Task
    from merganser.tuning.sweep import TaskScore

    asked = [Task.parse(text) for text in tasks]
    directory = recipes.prepare(recipes.load(recipe)).sources[0].directory
    kind = language.kind_of_model(directory)
    if directory is None or kind is None:
        raise InputError(f"{recipe}: tasks need models that transformers loads; use --score for others")
    return TaskScore(language.load(directory, kind, device).module, asked, str(directory))


def _text(found: Sweep) -> str:
    names = list(dict.fromkeys(name for trial in found.trials for name in trial.values))
    rows = [(trial.score, trial.budget, *(trial.values.get(name) for name in names)) for trial in found.trials]
    text = Table(("score", "on", *names), rows).text()
    return text if found.unseen is None else f"{text}\n\nthe best on questions that were not asked: {found.unseen:.4f}"
