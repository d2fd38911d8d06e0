"""Forgetting in a language model: a new skill against what the model knew, along the training and along WiSE-FT."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.reporting.formats import amount, percent, standard_error
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text

STORIES = "stories"
WAYS = {"training": "along the training", "path": "along WiSE-FT"}
Rows = Sequence[Mapping[str, float]]


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    """A text and a table for every stage and rate, and a figure with a panel for every stage."""
    stages = stages_of(results)
    skills = ", ".join(f"{standard_error(0.5, count)} for {name}" for name, count in results["held_out"].items())
    seeds = len({run["seed"] for run in results["runs"]})
    yield Text(
        "stories15M learns one skill after another, with all weights. Its first knowledge is measured by the "
        f"perplexity on {results['stories']} stories that it wrote itself, and a skill by the share of right answers. "
        "Both are taken along the training, and on the straight line from the weights before (α = 0) to those after "
        f"(α = 1), which is WiSE-FT. Mean over {seeds} training seed{'s' if seeds > 1 else ''}; one standard error of "
        f"a share over the held-out questions is at most (in points) {skills}."
    )
    for (learns, knew), rates in stages.items():
        for rate, found in rates.items():
            yield Text(_said(learns, knew, rate, found))
        yield _table(learns, knew, rates, "training", "steps {:.0f}")
        yield _table(learns, knew, rates, "path", "α = {:.1f}")
    panels = [_panel(learns, knew, rates) for (learns, knew), rates in stages.items()]
    yield Figure("forgetting", "What is kept against what is learned, along the training and along WiSE-FT", panels)


def stages_of(results: Mapping[str, Any]) -> dict[tuple[str, str], dict[float, dict[str, Any]]]:
    """Return the rows of both ways and the proposed α, averaged over seeds.

    They are listed by what is learned and what was known, and then by rate.
    """
    runs: dict[tuple[str, str], dict[float, list[Mapping[str, Any]]]] = {}
    for run in results["runs"]:
        runs.setdefault((run["learns"], run["knew"]), {}).setdefault(run["rate"], []).append(run)
    return {
        stage: {
            rate: {way: _means([run[way] for run in own]) for way in ("training", "path")}
            | {"take": fmean(run["take"] for run in own)}
            for rate, own in rates.items()
        }
        for stage, rates in runs.items()
    }


def _means(runs: Sequence[Rows]) -> list[dict[str, float]]:
    return [
        {key: fmean(row[key] for row in rows) for key in ("at", "kept", "learned")} for rows in zip(*runs, strict=True)
    ]


def kept(knew: str, value: float) -> str:
    """Return a score of what was known: of stories the perplexity, of a skill the share of right answers."""
    return amount(math.exp(-value)) if knew == STORIES else percent(value)


def best_of_both(found: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the row of the line that is nearest to the proposed α."""
    row: Mapping[str, float] = min(found["path"], key=lambda row: abs(row["at"] - found["take"]))
    return row


def _said(learns: str, knew: str, rate: float, found: Mapping[str, Any]) -> str:
    first, last, chosen = found["path"][0], found["path"][-1], best_of_both(found)
    measure = "the perplexity on stories" if knew == STORIES else knew
    unit = "" if knew == STORIES else " %"
    return (
        f"**{learns.capitalize()} after {knew}, rate {rate:g}.** Training raises {learns} from "
        f"{percent(first['learned'])} to {percent(last['learned'])} % and changes {measure} from "
        f"{kept(knew, first['kept'])} to {kept(knew, last['kept'])}{unit}. At α = {chosen['at']:.1f}, which "
        f"`forgetting_path` proposes, they are {percent(chosen['learned'])} % and "
        f"{kept(knew, chosen['kept'])}{unit}."
    )


def _table(learns: str, knew: str, rates: Mapping[float, Mapping[str, Any]], way: str, name: str) -> Table:
    """A line for every point of a way, and two columns for every rate."""
    measure = "perplexity on its stories" if knew == STORIES else f"{knew}, %"
    columns = ["", *(f"{what}, rate {rate:g}" for rate in rates for what in (f"{learns}, %", measure))]
    cells = [
        [
            name.format(rows[0]["at"]),
            *(cell for row in rows for cell in (percent(row["learned"]), kept(knew, row["kept"]))),
        ]
        for rows in zip(*(found[way] for found in rates.values()), strict=True)
    ]
    return Table(columns, cells, f"{learns.capitalize()} after {knew}, {WAYS[way]}")


def _panel(learns: str, knew: str, rates: Mapping[float, Mapping[str, Any]]) -> Lines:
    def height(row: Mapping[str, float]) -> float:
        return math.exp(-row["kept"]) if knew == STORIES else row["kept"]

    series = {
        f"{told}, rate {rate:g}": [(row["learned"], height(row)) for row in found[way]]
        for rate, found in rates.items()
        for way, told in WAYS.items()
    }
    stories, skill = Axis("perplexity on its stories", log=True), Axis(f"{knew}, right answers", percent=True)
    x = Axis(f"{learns}, right answers", percent=True)
    return Lines(series, x, stories if knew == STORIES else skill, f"{learns} after {knew}")
