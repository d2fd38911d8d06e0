"""The page of a sweep: scores of every variant of a recipe on every budget it reached."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from merganser.errors import RecipeError
from merganser.evolve.arrays import Array
from merganser.evolve.intervals import objective_interval, paired_interval
from merganser.evolve.objectives import Objective
from merganser.recipes.documents import parse
from merganser.report.charts import Dot, Series, dot_plot, line_chart, parallel_coordinates
from merganser.report.page import Page
from merganser.report.tables import Table
from merganser.strict_json import parse_json

_KEYS = {"label", "budget", "score", "scored_by", "key"}
#: Variants whose intervals are drawn.
SHOWN = 20


def is_sweep(file: Path) -> bool:
    """Return whether a file of JSON lines is the journal of a sweep."""
    return bool(file.suffix == ".jsonl" and _read_lines(file, 1))


def fill(page: Page, file: Path, check: bool) -> dict[str, Any]:
    scores = _read_lines(file)
    values = [_read_values(record) for record in scores]
    names = list(dict.fromkeys(name for each in values for name in each))
    last = {record["label"]: position for position, record in enumerate(scores)}
    order = sorted(last.values(), key=lambda i: (-scores[i]["budget"], -_number(scores[i]["score"])))
    best = scores[order[0]]
    page.items(
        [
            f"{len(last):,} variants, {len(scores):,} scores by {scores[0]['scored_by']}",
            f"best on {best['budget']:,} questions: {best['label']} with {_number(best['score']):.4f}",
            *_judge_best([scores[i] for i in order]),
        ]
    )
    _compare(page, names, [(values[i], scores[i]) for i in order])
    _search(page, names, [(values[i], scores[i]) for i in order])
    table = variant_table((scores[i]["score"], scores[i]["budget"], values[i]) for i in order)
    methods = len({str(each.get("method")) for each in values}) > 1
    for name in names:
        points = [(values[i][name], scores[i]) for i in order if name in values[i]]
        if all(isinstance(value, (int, float)) for value, _ in points) and len({value for value, _ in points}) > 1:
            page.chart(_draw_parameter(name, points, methods))
    page.table(table.columns, table.rows, table.caption, {"score": "max"})
    budgets = sorted({record["budget"] for record in scores})
    if len(budgets) > 1:
        found = {(record["label"], record["budget"]): record["score"] for record in scores}
        rungs = [[scores[i]["label"], *(found.get((scores[i]["label"], b)) for b in budgets)] for i in order]
        page.add(Table(["variant", *(f"on {budget}" for budget in budgets)], rungs, "From rung to rung"))
    return {"kind": "sweep", "file": file.name, "variants": len(last), "best": best["label"], "score": best["score"]}


def variant_table(trials: Iterable[tuple[float | None, int, Mapping[str, Any]]]) -> Table:
    """Return the score of every variant, its budget (the largest it was given) and its values, in their order."""
    trials = list(trials)
    names = list(dict.fromkeys(name for _, _, values in trials for name in values))
    rows = [[score, budget, *(values.get(name) for name in names)] for score, budget, values in trials]
    return Table(["score", "on", *names], rows, "Every variant on the largest budget it was given")


def _read_lines(file: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the records, up to an incomplete last line."""
    found: list[dict[str, Any]] = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = parse_json(line)
            except ValueError:
                break
            if not isinstance(record, dict) or not set(record) >= _KEYS:
                break
            found.append(record)
            if len(found) == limit:
                break
    return found


def _read_values(record: dict[str, Any]) -> dict[str, Any]:
    """Return a variant's values: `values` of the record, or parsed from its label `weight=[0.2, 0.8] method=ties`."""
    if isinstance(known := record.get("values"), dict):
        return known
    _, *parts = re.split(r"(?:^| )([^\s=]+)=", record["label"])
    return {name: _parse_value(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _parse_value(text: str) -> Any:
    try:
        return parse(text)[0]
    except (RecipeError, IndexError):
        return text


def _number(score: float | None) -> float:
    return float("-inf") if score is None else score


def _judge_best(ordered: list[dict[str, Any]]) -> list[str]:
    """Return whether the best can be told from the runner-up, from their answers to the same questions."""
    finalists = [record for record in ordered if record["budget"] == ordered[0]["budget"]][:2]
    answers = [_read_answers(record) for record in finalists]
    sizes = [{task: len(each) for task, each in own.items()} for own in answers]
    if len(sizes) < 2 or not sizes[0] or sizes[0] != sizes[1]:
        return []
    found = paired_interval(_find_objective(answers[0]), answers[0], answers[1])
    count = sum(map(len, answers[0].values()))
    words = f"by {found.value:+.3f} (95 % interval {found.low:+.3f} to {found.high:+.3f}, item by item)"
    second = finalists[1]["label"]
    if found.verdict == "cannot tell":
        return [f"cannot tell the best from the runner-up, {second}, with {count:,} questions: they differ {words}"]
    return [f"better than the runner-up, {second}, {words}"]


def _compare(page: Page, names: list[str], ordered: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Add the best variants with the intervals of their scores, if their answers are known."""
    dots = []
    for values, record in ordered[:SHOWN]:
        if answers := _read_answers(record):
            found = objective_interval(_find_objective(answers), answers)
            name = " · ".join(str(values.get(each, "–")) for each in names)
            dots.append(Dot(name, found.value, found.low, found.high))
    if dots:
        caption = (
            f"The best variants ({' · '.join(names)}) with 95 % intervals over their questions. The score of the best "
            "of many is optimistic."
        )
        page.chart(dot_plot(dots, "score", caption=caption))


def _search(page: Page, names: list[str], points: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Add every variant as a line over its values, methods included, if several were varied."""
    scored = [(values, record["score"]) for values, record in points if record["score"] is not None]
    varied = [name for name in names if len({str(values.get(name)) for values, _ in scored}) > 1]
    if len(varied) > 1:
        rows = [[_to_coordinate(values.get(name)) for name in varied] for values, _ in scored]
        page.chart(parallel_coordinates(varied, rows, [score for _, score in scored], caption="Every variant."))


def _to_coordinate(value: Any) -> float | str:
    """Return a value as parallel coordinates place it: a number, or a text."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number else "–" if value is None else str(value)


def _read_answers(record: dict[str, Any]) -> dict[str, Array]:
    """Return the answers of a record by task; none in journals that lack them."""
    found = record.get("answers") or []
    return {f"task {i}": np.array(each, float) for i, each in enumerate(found) if each}


def _find_objective(answers: Mapping[str, Array]) -> Objective:
    return Objective("score", {name: 1 / len(answers) for name in answers})


def _draw_parameter(name: str, points: list[tuple[Any, dict[str, Any]]], methods: bool) -> str:
    """Return a chart of scores over one parameter, in the colours of methods if they vary; smaller budgets faint."""
    largest = max(record["budget"] for _, record in points)
    groups: dict[tuple[str, int], list[tuple[Any, float | None]]] = {}
    for value, record in points:
        method = str(_read_values(record).get("method", "")) if methods else ""
        groups.setdefault((method, record["budget"]), []).append((value, record["score"]))
    series = []
    for (method, budget), each in sorted(groups.items()):
        xs, ys = zip(*each, strict=True)
        words = f"{method}, on {budget:,}" if method else f"on {budget:,}"
        series.append(Series(words, xs, ys, joined=False, faint=budget != largest, group=method))
    caption = f"Faint: on fewer than {largest:,} questions." if methods and len({b for _, b in groups}) > 1 else ""
    return line_chart(series, name, "score", caption=caption)
