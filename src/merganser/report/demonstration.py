"""The page of the demo: experts merged in several ways, and networks trained independently."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from merganser.report.charts import Dot, dot_plot
from merganser.report.page import Page
from merganser.strict_json import read_json

FILE = "results.json"


def write(
    directory: Path, tasks: Sequence[str], images: int, merging: list[list[Any]], alignment: list[list[Any]]
) -> None:
    """Store the accuracies beside the models: rows of a model, its accuracy on each task, their mean, normalised.

    `images` is the number of test images, which all tasks share.
    """
    content = {"tasks": list(tasks), "images": images, "merging": merging, "alignment": alignment}
    (directory / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def is_demo(path: Path) -> bool:
    file = path / FILE
    if not file.is_file():
        return False
    try:
        found = read_json(file)
    except ValueError:
        return False
    return isinstance(found, dict) and {"tasks", "images", "merging", "alignment"} <= set(found)


def fill(page: Page, directory: Path, check: bool) -> dict[str, Any]:
    found = read_json(directory / FILE)
    page.heading("Accuracy on each task")
    best = {"mean": "max", "normalised": "max"}
    page.table(["model", *found["tasks"], "mean", "normalised"], found["merging"], best=best)
    page.text("Normalised accuracy is the mean over tasks of the merged model's accuracy over its expert's.")
    page.chart(_draw_means(found["merging"], found["images"]))
    page.heading("Three networks trained independently")
    page.table(["model", "accuracy"], found["alignment"])
    for recipe in sorted((directory / "recipes").glob("tsv.yml")):
        page.heading("One of the recipes")
        page.code(recipe.read_text(encoding="utf-8"))
    return {"kind": "demo", **found}


def _draw_means(rows: list[list[Any]], images: int) -> str:
    dots = []
    for name, *accuracies, mean, _ in rows:
        # The tasks share their images, so that their errors may add up: the mean of the errors is a bound.
        error = sum(math.sqrt(max(0.0, p * (1 - p)) / images) for p in accuracies) / len(accuracies)
        dots.append(Dot(name, mean, mean - error, mean + error))
    caption = f"Mean accuracy over the tasks and one standard error, {images} test images."
    return dot_plot(dots, "mean accuracy", caption=caption)
