"""Networks of one task trained apart: plain mean, matching, and the universe, with and without REPAIR."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks import answers
from benchmarks.reporting.formats import error_of, number, percent, points
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text
from benchmarks.zoo.drift import LIMIT


@dataclass(frozen=True)
class Goal:
    """Accuracy of single networks, and the share of it that a merge of so many should keep.

    `reason` says why single networks are below their goal.
    """

    single: float
    models: int
    kept: float
    reason: str = ""

    def __str__(self) -> str:
        return (
            f"single networks at {percent(self.single, 0)} % or more, of which a mean of {self.models} after C²M³ and "
            f"REPAIR keeps {percent(self.kept, 0)} %"
        )


MANY = "MergeMany"
RIVALS = (MANY, "MergeMany by Frank-Wolfe", "match activations to the first")
GOALS = {
    "resnet20-bn": Goal(single=0.88, models=5, kept=0.7),
    "resnet20-ln": Goal(
        single=0.88,
        models=3,
        kept=0.7,
        reason="LayerNorm over the channels of a pixel learns more slowly than BatchNorm in as many steps; higher "
        "rates and AdamW did not change that in a short trial",
    ),
    "resnet20-bn-2x": Goal(single=0.9, models=3, kept=0.7),
    "vgg11-bn": Goal(single=0.86, models=3, kept=0.6),
}
#: Of one class of ten, the number of every set of images here.
CHANCE = 0.1


def section(network: str) -> Any:
    return partial(parts, network)


def parts(network: str, results: Mapping[str, Any]) -> Iterator[Part]:
    counts = sorted(int(key) for key in results if key.isdigit())
    tables = {n: results[str(n)] for n in counts}
    single = results["single"]
    mean = sum(single) / len(single)
    last = tables[counts[-1]]
    ways = list(dict.fromkeys(way for table in tables.values() for way in table))
    plain = ways[0]
    ours = "C²M³"
    images = results["settings"]["test_images"]
    plainly, universe = (
        [percent(last[way][key]) for key in ("accuracy", "repaired_accuracy")] for way in (plain, ours)
    )
    yield Text(
        f"{len(single)} networks trained from different seeds{_training(results)} each classify {percent(mean)} % of "
        f"{images:,} test images correctly on average. The plain mean of {counts[-1]} of them reaches {plainly[0]} %, "
        f"and {plainly[1]} % after REPAIR. With C²M³, the mean reaches {universe[0]} % and {universe[1]} %."
        + _leads(last, ours, images)
        + _conditions(tables, results["settings"])
    )
    yield Text(_guards(results))
    yield _accuracies(tables, ways, "accuracy", "Accuracy of the merge, %", images)
    yield _accuracies(tables, ways, "repaired_accuracy", "Accuracy after REPAIR, %", images)
    yield from _compared(tables, mean, images)
    if network in GOALS:
        yield from _goals(GOALS[network], tables, mean, images)
    if any(row["cycle_error"] for table in tables.values() for row in table.values()):
        yield _cycles(tables, ways)
    if len(counts) > 1:
        yield _curves(network, tables, mean)


def _compared(tables: Mapping[int, Any], single: float, images: int) -> Iterator[Part]:
    """Both kinds of C²M³ against their rivals, image by image."""
    rows = []
    for count, table in tables.items():
        right = _right(table, images)
        for kind in (way for way in right if way.startswith("C²M³")):
            accuracy = table[kind]["repaired_accuracy"]
            found = (answers.paired(right[kind], right[rival]) if rival in right else None for rival in RIVALS)
            rows.append(
                [
                    f"{count}",
                    kind,
                    f"{percent(accuracy)} ± {percent(error_of(accuracy, images))}",
                    percent(accuracy / single),
                    *("–" if gap is None else points(gap) for gap in found),
                ]
            )
    if rows:
        columns = [
            "n",
            "",
            "accuracy, %",
            "share of single networks, %",
            *(f"above {rival}, points" for rival in RIVALS),
        ]
        caption = (
            "After REPAIR, compared on the same images; ± one standard error, of differences over images and orders of "
            "MergeMany; bold: more than two of them"
        )
        yield Table(columns, rows, caption)


def _right(table: Mapping[str, Any], images: int) -> dict[str, np.ndarray]:
    """Which images the merges classify correctly after REPAIR, shape (runs, images), where that is stored."""
    return {
        way: np.stack([answers.unpack(bits, images) for bits in row["repaired_right"]])
        for way, row in table.items()
        if "repaired_right" in row
    }


def _goals(goal: Goal, tables: Mapping[int, Any], single: float, images: int) -> Iterator[Part]:
    reached = single >= goal.single
    why = "" if reached or not goal.reason else f"; {goal.reason}"
    yield Text(
        f"Goal: single networks at {percent(goal.single, 0)} % or more: {_met(reached)} ({percent(single)} %{why})."
    )
    kept = f"C²M³ of either kind with REPAIR keeps {percent(goal.kept, 0)} % of their accuracy with {goal.models}"
    table = tables.get(goal.models, {})
    right = _right(table, images)
    kinds = [way for way in right if way.startswith("C²M³")]
    if not kinds or MANY not in right:
        yield Text(f"Goal: {kept} networks: not met, because only {max(tables)} networks have been merged so far.")
        return
    best = max(kinds, key=lambda way: table[way]["repaired_accuracy"])
    share, gap = table[best]["repaired_accuracy"] / single, answers.paired(right[best], right[MANY])
    yield Text(f"Goal: {kept} networks: {_met(share >= goal.kept)} ({best}, {percent(share)} %).")
    ahead = _met(gap.mean > 2 * gap.error)
    yield Text(
        f"Goal: that merge is above MergeMany with REPAIR by more than two standard errors: {ahead} "
        f"({points(gap).strip('*')} points)."
    )


def _met(reached: bool) -> str:
    return "met" if reached else "not met"


def _guards(results: Mapping[str, Any]) -> str:
    """Whether the networks left their initialisation, and what matching finds in networks that never did."""
    known = results.get("guards")
    if not known:
        return "Guards: not recorded for these networks; `make zoo` trains them again and records them."
    cosine = max(known["median_cosine"])
    pairs = {kind: f"{known[kind]['before']:.3f} to {known[kind]['after']:.3f}" for kind in ("trained", "untrained")}
    counted = known.get("counted", "parameters")
    return (
        f"Guards: the median cosine of initial and trained weights is at most {cosine:.3f} "
        f"({'within' if cosine <= LIMIT else 'above'} the limit of {LIMIT}). Matching raises the cosine of the "
        f"{counted} of two trained networks from {pairs['trained']}, and of the same two before training from "
        f"{pairs['untrained']}."
    )


def _training(results: Mapping[str, Any]) -> str:
    known = results.get("training")
    if not known:
        return ""
    images, epochs = (" or ".join(f"{value:,}" for value in known[key]) for key in ("images", "epochs"))
    precision = " or ".join(known.get("precision", ("float32",)))
    return f" on {images} images for {epochs} epochs" + (f" in {precision}" if precision != "float32" else "")


def _leads(last: Mapping[str, Any], ours: str, images: int) -> str:
    """Who is ahead of C²M³ by more than one standard error, before REPAIR and after, if it is no matter of chance."""
    found = ""
    for key, when in (("accuracy", "Before REPAIR"), ("repaired_accuracy", "After REPAIR")):
        best = max(last, key=lambda way: last[way][key])
        if last[best][key] < 1.5 * CHANCE:
            found += f" {when}, nothing is far from chance."
            continue
        if last[best][key] - last[ours][key] > error_of(last[ours][key], images):
            found += f" {when}, {best} is ahead with {percent(last[best][key])} %."
    return found


def _conditions(tables: Mapping[int, Any], settings: Mapping[str, Any]) -> str:
    runs = sorted({row["runs"] for table in tables.values() for row in table.values() if row.get("runs", 1) > 1})
    drawn = (
        f" ± is the standard deviation over {' or '.join(map(str, runs))} random orders of MergeMany." if runs else ""
    )
    repair = settings.get("repair")
    return (f" REPAIR works {repair.replace('one', 'on all layers in one')}." if repair else "") + drawn


def _curves(network: str, tables: Mapping[int, Any], mean: float) -> Figure:
    # A curve needs every count; rows may have been added to some.
    plain, *matched = ways = [way for way in next(iter(tables.values())) if all(way in row for row in tables.values())]
    panels = [("accuracy", ways, "as merged"), ("repaired_accuracy", matched, "after REPAIR")]
    if min(row[way]["accuracy"] - row[plain]["accuracy"] for row in tables.values() for way in matched) > 0.3:
        panels.insert(1, ("accuracy", matched, "without the plain mean"))
    drawn = [
        Lines(
            {way: [(n, row[way][key]) for n, row in tables.items()] for way in shown},
            Axis("networks", whole=True),
            Axis("accuracy", percent=True),
            title,
            levels={"single networks": mean},
        )
        for key, shown, title in panels
    ]
    return Figure(f"single_task_{network}", f"Accuracy of merges of {network} networks trained apart", drawn)


def _cycles(tables: Mapping[int, Any], ways: list[str]) -> Table:
    rows = [
        [way, *(number(table[way]["cycle_error"]) if way in table else "–" for table in tables.values())]
        for way in ways
    ]
    return Table(
        ["cycle error", *(f"n = {n}" for n in tables)], rows, "How far the permutations are from cycle consistency"
    )


def _accuracies(tables: Mapping[int, Any], ways: list[str], key: str, caption: str, images: int) -> Table:
    rows = []
    for way in ways:
        cells = []
        for table in tables.values():
            if way not in table:
                cells.append("–")
                continue
            best = max(each[key] for each in table.values())
            cell = percent(table[way][key])
            around = table[way].get("spread" if key == "accuracy" else "repaired_spread")
            if around is not None:
                cell += f" ± {percent(around)}"
            cells.append(f"**{cell}**" if table[way][key] >= best - error_of(best, images) else cell)
        rows.append([way, *cells])
    return Table(["", *(f"n = {n}" for n in tables)], rows, f"{caption}; bold: within one standard error of the best")
