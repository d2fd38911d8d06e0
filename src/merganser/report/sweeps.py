"""The page of a sweep: scores of every variant of a recipe on every budget it reached."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from merganser.errors import RecipeError
from merganser.recipes.documents import parse
from merganser.report.charts import Series, line_chart
from merganser.report.page import Page
from merganser.report.tables import Table
from merganser.strict_json import parse_json

_KEYS = {"label", "budget", "score", "scored_by", "key"}


def is_sweep(file: Path) -> bool:
    """Return whether a file of JSON lines is the journal of a sweep."""
    return bool(file.suffix == ".jsonl" and _lines(file, 1))


def fill(page: Page, file: Path, check: bool) -> dict[str, Any]:
    scores = _lines(file)
    values = [_values(record) for record in scores]
    names = list(dict.fromkeys(name for each in values for name in each))
    last = {record["label"]: position for position, record in enumerate(scores)}
    order = sorted(last.values(), key=lambda i: (-scores[i]["budget"], -_number(scores[i]["score"])))
    best = scores[order[0]]
    page.items(
        [
            f"{len(last)} variants, {len(scores)} scores by {scores[0]['scored_by']}",
            f"best on {best['budget']} questions: {best['label']} with {_number(best['score']):.4f}",
        ]
    )
    rows = [[scores[i]["score"], scores[i]["budget"], *(values[i].get(name) for name in names)] for i in order]
    for name in names:
        points = [(values[i].get(name), scores[i]) for i in order]
        if all(isinstance(value, (int, float)) for value, _ in points) and len({value for value, _ in points}) > 1:
            page.chart(_against(name, points))
    page.table(["score", "on", *names], rows, "Every variant on the largest budget it was given", {"score": "max"})
    budgets = sorted({record["budget"] for record in scores})
    if len(budgets) > 1:
        found = {(record["label"], record["budget"]): record["score"] for record in scores}
        rungs = [[scores[i]["label"], *(found.get((scores[i]["label"], b)) for b in budgets)] for i in order]
        page.add(Table(["variant", *(f"on {budget}" for budget in budgets)], rungs, "From rung to rung"))
    return {"kind": "sweep", "file": file.name, "variants": len(last), "best": best["label"], "score": best["score"]}


def _lines(file: Path, limit: int | None = None) -> list[dict[str, Any]]:
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


def _values(record: dict[str, Any]) -> dict[str, Any]:
    """Return a variant's values: `values` of the record, or parsed from its label `weight=[0.2, 0.8] method=ties`."""
    if isinstance(known := record.get("values"), dict):
        return known
    _, *parts = re.split(r"(?:^| )([^\s=]+)=", record["label"])
    return {name: _value(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _value(text: str) -> Any:
    try:
        return parse(text)[0]
    except (RecipeError, IndexError):
        return text


def _number(score: float | None) -> float:
    return float("-inf") if score is None else score


def _against(name: str, points: list[tuple[Any, dict[str, Any]]]) -> str:
    """Return a chart of scores over one parameter, with smaller budgets faint."""
    budgets = sorted({record["budget"] for _, record in points})
    series = []
    for budget in budgets:
        here = [(value, record["score"]) for value, record in points if record["budget"] == budget]
        xs, ys = zip(*here, strict=True)
        series.append(Series(f"on {budget}", xs, ys, joined=False, faint=budget != budgets[-1]))
    return line_chart(series, name, "score")
