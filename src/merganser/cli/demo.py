"""`merganser demo`: train small models, merge them in several ways and compare the results in two minutes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.cli.options import Json, Out, Overwrite, Seed
from merganser.cli.output import emit, say
from merganser.report.tables import Table

if TYPE_CHECKING:
    from merganser.digits import Digits

RECIPES: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic": {"weight": 0.3},
    "ties": {"density": 0.5, "scale": 0.5},
    "dare_ties": {"density": 0.8, "scale": 0.5},
    "model_stock": {},
    "karcher": {},
    "tsv": {},
    "iso_cts": {},
}
BASELESS = ("linear", "karcher")

Tell = Callable[[str], None]


def command(
    out: Out = Path("merganser-demo"),
    overwrite: Overwrite = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train and merge small networks, and compare them.

    The networks classify handwritten digits.

    Fine-tunes a base on four tasks (upright, flipped, rotated and inverted digits) and merges the experts with
    recipes, through the same engine as any checkpoint. Then averages three networks trained from different seeds,
    unaligned and after alignment.
    """
    from merganser.digits import Digits
    from merganser.engine.directories import is_empty
    from merganser.engine.publishing import check_out, publish
    from merganser.errors import InputError
    from merganser.report.demonstration import is_demo

    digits = Digits(seed)
    check_out(out, overwrite)
    if out.exists() and not is_empty(out) and not is_demo(out):
        raise InputError(f"{out} is not the output of a demo and will not be replaced; choose another OUT")
    found: dict[str, Any] = {}
    tell = partial(say, stream=sys.stderr) if as_json else say
    publish(out, lambda directory: found.update(_demonstrate(digits, directory, tell)), overwrite=overwrite)
    if as_json:
        emit({"event": "done", "path": str(out), **found})
        return
    say(f"\nMerged checkpoints are in {out}/merged, the report is {out}/report.html")


def _demonstrate(digits: Digits, out: Path, tell: Tell) -> dict[str, Any]:
    """Write everything into OUT and return the rows of both tables."""
    from merganser.report import Page, demonstration

    tell("Training a base and four experts on 8×8 handwritten digits …\n")
    merging = _merge_experts(digits, out, tell)
    alignment = _align_strangers(digits, tell)
    demonstration.write(out, list(digits.tasks), digits.test_images, merging, alignment)
    page = Page("Merging digit classifiers", "Four experts fine-tuned from one base, merged by recipe.")
    demonstration.fill(page, out, check=False)
    page.write(out / "report.html")
    return {"merging": merging, "alignment": alignment}


def _merge_experts(digits: Digits, out: Path, tell: Tell) -> list[list[object]]:
    from merganser.plain import to_yaml
    from merganser.recipes.running import run

    base = digits.train_base()
    experts = {task: digits.fine_tune(base, task) for task in digits.tasks}
    for label, module in {"base": base, **experts}.items():
        digits.save(module, out / "models" / label)
    own = [digits.accuracy(expert, task) for task, expert in experts.items()]
    rows: list[list[object]] = [_row("base", digits, base, own)]
    rows += [_row(f"{task} expert", digits, expert, own) for task, expert in experts.items()]
    (out / "merged").mkdir()
    (out / "recipes").mkdir()
    for method, parameters in RECIPES.items():
        recipe: dict[str, Any] = {
            "method": method,
            "models": [f"../models/{task}" for task in experts],
            "parameters": parameters,
        }
        if method not in BASELESS:
            recipe["base"] = "../models/base"
        file = out / "recipes" / f"{method}.yml"
        file.write_text(to_yaml(recipe))
        merged = run(file, out / "merged" / method)
        rows.append(_row(method, digits, digits.load(merged), own))
    tell(Table(["model", *digits.tasks, "mean", "normalised"], rows, "Accuracy on each task").text())
    return rows


def _row(label: str, digits: Digits, module: Any, own: list[float]) -> list[object]:
    scores = [digits.accuracy(module, task) for task in digits.tasks]
    mean = sum(scores) / len(scores)
    return [label, *scores, mean, sum(s / o for s, o in zip(scores, own, strict=True)) / len(own)]


def _align_strangers(digits: Digits, tell: Tell) -> list[list[object]]:
    from merganser import align
    from merganser.recipes.running import merge

    models = [digits.train_apart(seed) for seed in (1, 2, 3)]
    symmetry = align.symmetry(models[0], (digits.example(),))
    universe = align.universe(models, symmetry)
    task = next(iter(digits.tasks))
    rows: list[list[object]] = [[f"trained with seed {i}", digits.accuracy(m, task)] for i, m in enumerate(models, 1)]
    rows.append(["plain average", digits.accuracy(digits.from_state(merge(models)), task)])
    rows.append(["average in the universe space (C²M³)", digits.accuracy(digits.from_state(universe.merged()), task)])
    tell("\n" + Table(["model", "accuracy"], rows, "Three networks trained independently").text())
    return rows
