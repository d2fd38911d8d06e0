"""The page of an autopilot run: the race, the check on unseen questions, and findings about the experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merganser.errors import InputError
from merganser.evolve.intervals import Interval
from merganser.plain import to_yaml
from merganser.report.charts import Dot, dot_plot
from merganser.report.page import Page
from merganser.report.tables import Table
from merganser.strict_json import read_json

FILE = "decision.json"
_KEYS = {"verdict", "text", "kept", "remarks", "challenges", "rungs"}


def write(directory: Path, decision: Mapping[str, Any]) -> None:
    """Store a decision, given as its `to_dict`."""
    (directory / FILE).write_text(json.dumps(decision, indent=1) + "\n", encoding="utf-8")


def is_decision(path: Path) -> bool:
    """Return whether a directory contains a decision of the autopilot."""
    try:
        found = read_json(path / FILE)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and set(found) >= _KEYS


def fill(page: Page, directory: Path, check: bool) -> dict[str, Any]:
    found = read_json(directory / FILE)
    try:
        fill_decision(page, found)
        return {"kind": "autopilot", **{key: found[key] for key in ("verdict", "text", "kept", "score", "asked")}}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{directory / FILE}: damaged, or not written by the autopilot: {error!r}; run it again"
        ) from None


def fill_decision(page: Page, found: Mapping[str, Any]) -> None:
    """Add a decision, given as its `to_dict`, to a page."""
    page.text(f"{found['text'][0].upper()}{found['text'][1:]}.")
    page.items([remark["text"] for remark in found["remarks"]])
    if found["challenges"]:
        page.heading("On unseen questions")
        page.add(challenge_table(found))
        if is_mean(found):
            page.text("Each score is the mean over the tasks:")
            page.add(task_table(found))
        scores = {c["label"]: c["score"] for c in found["challenges"]}
        dots = [Dot(label, score["value"], score["low"], score["high"]) for label, score in scores.items()]
        page.chart(dot_plot(dots, "score", caption="Scores on unseen questions with 95 % intervals."))
    if found["rungs"]:
        page.heading("The race")
        seconds = round(found["seconds"])
        page.text(
            f"{found['asked']:,} questions in {seconds:,} second{'s' * (seconds != 1)} of merging and asking"
            + ("; the budget ended it early." if found["stopped"] else ".")
        )
        page.chart(race_chart(found))
        page.add(race_table(found))
    for title, key in (("Recipe", "recipe"), ("Recipe of the best merge, which was not chosen", "best_recipe")):
        if found[key] and not (key == "best_recipe" and found["recipe"] == found["best_recipe"]):
            page.heading(title)
            page.code(to_yaml(found[key]))


def challenge_table(found: Mapping[str, Any]) -> Table:
    """Return the comparisons on unseen questions."""
    rows = [
        [
            c["label"],
            c["score"]["value"],
            _format_interval(c["score"]),
            "" if c["gain"] is None else f"{c['gain']['value']:+.3f}",
            "" if c["gain"] is None else _format_interval(c["gain"]),
            c["against"] or "",
            "" if c["gain"] is None else Interval(**c["gain"]).verdict,
        ]
        for c in found["challenges"]
    ]
    return Table(["contender", "score", "95 %", "gain", "95 %", "over", "verdict"], rows)


def is_mean(found: Mapping[str, Any]) -> bool:
    """Return whether scores are means over several tasks."""
    return any(len(challenge["by_task"]) > 1 for challenge in found["challenges"])


def task_table(found: Mapping[str, Any]) -> Table:
    """Return the score of every contender on the unseen questions of each task."""
    by_label = {c["label"]: c["by_task"] for c in found["challenges"]}
    tasks = list(next(iter(by_label.values())))
    return Table(["contender", *tasks], [[label, *(own[task] for task in tasks)] for label, own in by_label.items()])


def race_table(found: Mapping[str, Any], limit: int | None = None) -> Table:
    """Return every contender with its last score, the number of questions per task, and why it left."""
    rejected = found["rejected"] or {}
    columns = ["contender", "score", "questions per task", "left the race"]
    rows = [[label, score, budget, rejected.get(label, "")] for label, (budget, score) in _find_last(found).items()]
    shown = rows[:limit]
    width = len(columns) - (not any(row[-1] for row in shown))
    return Table(columns[:width], [row[:width] for row in shown])


def race_chart(found: Mapping[str, Any]) -> str:
    """Return a chart of the scores of contenders on every rung, those that got furthest first."""
    ends = sorted({rung["budget"] for rung in found["rungs"]})
    dots = [
        Dot(label, rung["scores"][label], series=ends.index(rung["budget"]))
        for label in _find_last(found)
        for rung in found["rungs"]
        if rung["scores"].get(label) is not None
    ]
    legend = [f"{end} {'question' if end == 1 else 'questions'} per task" for end in ends]
    return dot_plot(
        dots, "score", legend=legend, caption="Scores of the contenders on an increasing number of questions."
    )


def _find_last(found: Mapping[str, Any]) -> dict[str, tuple[int, float | None]]:
    """Return the last rung of every contender and its score there, the furthest and best first."""
    last = {label: (rung["budget"], score) for rung in found["rungs"] for label, score in rung["scores"].items()}
    order = sorted(last, key=lambda label: (-last[label][0], float("inf") if (s := last[label][1]) is None else -s))
    return {label: last[label] for label in order}


def _format_interval(interval: Mapping[str, float]) -> str:
    return f"{interval['low']:.3f} to {interval['high']:.3f}"
