"""The autopilot beside a full grid, and on sets of experts that are built to fail."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.reporting.formats import percent, signed
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text

#: The share of the grid's questions that the autopilot should not exceed.
GOAL = 0.1
#: What the experts are experts in, by what they are asked.
KINDS = {"sentences": "text", "images": "image", "prompts": "language-model"}


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    best, runs, grid = results["best"], results["runs"], results["grid"]
    close = [run for run in runs if run["behind"] <= best["error"]]
    share = max(run["share"] for run in runs)
    methods = list(dict.fromkeys(row["method"] for row in grid))
    questions = results.get("questions", "sentences")
    kind = KINDS[questions]
    yield Text(
        f"We merged {len(results['tasks'])} {kind} experts with {len(methods)} methods at {len(grid) // len(methods)} "
        f"scales each and tested every merge on all {sum(results['validation'].values())} validation {questions}: "
        f"{results['full']:,} questions. `mg.tuning.auto` had the same experts and {questions}. Both winners are "
        f"compared on {sum(results['test'].values()):,} test {questions}."
    )
    yield Text(
        f"The best of the grid, {best['label']}, has a test accuracy of {percent(best['test'])} % ± "
        f"{percent(best['error'])} (one standard error). The autopilot's winner is within one standard error of it, or "
        f"better, in {len(close)} of {len(runs)} runs, with at most {percent(share)} % of the grid's questions. Goal "
        f"(within one standard error at 10 % of the questions): "
        f"{'met' if len(close) == len(runs) and share <= GOAL else 'not met'}. How often to expect this of other "
        "questions is estimated [below](#the-autopilot-in-simulated-exams)."
    )
    if luck := results.get("luck"):
        same, behind = sum(each <= best["error"] for each in luck), 100 * sum(luck) / len(luck)
        yield Text(
            f"How much of this is luck: on other samples of as many {questions} (drawn with replacement), the best of "
            f"the grid is within one standard error of this one, or better, in {same} of {len(luck)} cases, and on "
            f"average {abs(behind):.1f} points {'behind' if behind > 0 else 'above'} it."
        )
    cells = [
        [
            str(run["seed"]),
            run["best"],
            f"{run['asked']:,}",
            percent(run["share"]),
            percent(run["test"]),
            f"{signed(100 * run['behind'])} ± {percent(run['paired'])}",
            f"{run['verdict']}: {run['kept']}",
        ]
        for run in runs
    ]
    columns = [
        "seed",
        "winner",
        "questions",
        "% of the grid's",
        "test accuracy, %",
        "behind the grid's, points",
        "verdict",
    ]
    yield Table(columns, cells, "The autopilot with different orders of the questions; ± is one standard error, paired")
    lines = {name: [(row["scale"], row["accuracy"]) for row in grid if row["method"] == name] for name in methods}
    panel = Lines(lines, Axis("scale"), Axis("validation accuracy", percent=True))
    yield Figure(
        "auto" if questions == "sentences" else f"auto_{questions}",
        "Validation accuracy of every method over its scale",
        [panel],
    )
    if results["spoilt"]:
        yield Text(
            "Then the last expert is spoilt: its values are shuffled (as if it had another base), it is given twice, "
            "or its task vector is made 20 times as long."
        )
        cells = [
            [row["set"], row["culprit"], _named(row), f"{row['verdict']} ({row['kept']})"] for row in results["spoilt"]
        ]
        yield Table(["set", "culprit", "what the autopilot says about it", "verdict"], cells)


def simulated(results: Mapping[str, Any]) -> Iterator[Part]:
    """What a grid and the autopilot miss where the truth is known."""
    runs = max(len(own["grid"]) for own in results.values())
    yield Text(
        f"With as many questions, is a better choice possible at all? In {runs} simulated exams of each zoo, the true "
        "accuracies are those of the measured grids, smoothed, and answers of similar merges are alike, so that it is "
        "known how far a choice is below the best merge. A full grid misses it too, as its best merge is partly the "
        "luckiest one. The last two columns say how often a choice is within one standard error of the measured exam "
        "behind the grid's, or better: that of the autopilot on the same questions, and that of a second full grid on "
        "other questions, which is what chance leaves of the goal at any cost."
    )
    cells = []
    for name, own in results.items():
        below = [np.array(own[kind]) for kind in ("grid", "autopilot")]
        behind = below[1] - below[0]
        means = (f"{100 * each.mean():.2f} ± {100 * _error(each):.2f}" for each in (*below, behind))
        cells.append([name, *means, *(percent(share) for share in shares_within_error(own))])
    columns = [
        "zoo",
        "grid, points below the best",
        "autopilot",
        "autopilot behind grid",
        "autopilot within one error, %",
        "second grid, %",
    ]
    yield Table(columns, cells, "Simulated exams; ± is one standard error over exams")


def shares_within_error(own: Mapping[str, Any]) -> tuple[float, float]:
    """Return how often the autopilot, and a full grid of another exam, are within one error behind the grid."""
    grid, autopilot = (np.array(own[kind]) for kind in ("grid", "autopilot"))
    others = ~np.eye(len(grid), dtype=bool)
    again = (grid[:, None] - grid)[others]
    return float((autopilot - grid <= own["error"]).mean()), float((again <= own["error"]).mean())


def _error(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def _named(row: Mapping[str, Any]) -> str:
    """Return the remarks on the culprit, or that it is not named."""
    own = [remark["text"] for remark in row["remarks"] if row["culprit"] in remark["experts"][:1]]
    return re.sub(r"-(0\.0+)\b", r"\1", "; ".join(own)) or "not named"
