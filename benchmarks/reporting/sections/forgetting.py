"""Forgetting in a language model: a new skill against what the model knew, along the training and along WiSE-FT."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.reporting.formats import amount, percent, standard_error
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text

STORIES = "stories"
Rows = Sequence[Mapping[str, float]]


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    """A text, a table and a panel of the figure for every stage: what is learned, and what was known before."""
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
    for (learns, knew), found in stages.items():
        yield Text(_said(learns, knew, found))
        yield _table(learns, knew, found)
    yield Figure(
        "forgetting", "What is kept against what is learned, along the training and along WiSE-FT", _panels(stages)
    )


def stages_of(results: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return, by what is learned and what was known, the rows of both ways, and the proposed α, averaged over seeds."""
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in results["runs"]:
        runs.setdefault((run["learns"], run["knew"]), []).append(run)
    return {
        stage: {way: _means([run[way] for run in own]) for way in ("training", "path")}
        | {"take": fmean(run["take"] for run in own)}
        for stage, own in runs.items()
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


def _said(learns: str, knew: str, found: Mapping[str, Any]) -> str:
    first, last, chosen = found["path"][0], found["path"][-1], best_of_both(found)
    unit = "perplexity" if knew == STORIES else "%"
    return (
        f"**{learns.capitalize()} after {knew}.** Training raises {learns} from {percent(first['learned'])} to "
        f"{percent(last['learned'])} % and changes {knew} from {kept(knew, first['kept'])} to "
        f"{kept(knew, last['kept'])} ({unit}). At α = {chosen['at']:.1f}, which `forgetting_path` proposes, "
        f"{learns} has {percent(chosen['learned'])} % and {knew} {kept(knew, chosen['kept'])}."
    )


def _table(learns: str, knew: str, found: Mapping[str, Any]) -> Table:
    measure = "perplexity on its stories" if knew == STORIES else f"{knew}, %"
    rows = [
        [name.format(row["at"]), kept(knew, row["kept"]), percent(row["learned"])]
        for name, way in (("{:.0f} steps", "training"), ("α = {:.1f}", "path"))
        for row in found[way]
    ]
    return Table(["", measure, f"{learns}, %"], rows, f"{learns.capitalize()} learned after {knew}")


def _panels(stages: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[Lines]:
    return [
        Lines(
            {
                name: [
                    (row["learned"], math.exp(-row["kept"]) if knew == STORIES else row["kept"]) for row in found[way]
                ]
                for name, way in (("along the training", "training"), ("along WiSE-FT", "path"))
            },
            Axis(f"{learns}, right answers", percent=True),
            Axis("perplexity on its stories", log=True)
            if knew == STORIES
            else Axis(f"{knew}, right answers", percent=True),
            f"{learns} after {knew}",
        )
        for (learns, knew), found in stages.items()
    ]
