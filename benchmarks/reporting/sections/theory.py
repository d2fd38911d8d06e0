"""Task vectors as gradients: one-epoch equality, orders of the gap, early against late merging."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import against, percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text

#: Numbers of epochs in words.
WORDS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    worst = max(row["relative"] for row in results["one_epoch"])
    yield Text(
        "We train a small tanh network on handwritten digits in float64 by full-batch gradient descent. After one "
        f"epoch, task arithmetic and one joint step give the same weights up to {worst:.0e} of the distance travelled. "
        "After more epochs they should differ by −αη²C + O(η³) ([theory](../theory.md)): on log-log axes, the gap has "
        "slope 2 in η, and the remainder after subtracting the term has slope 3. We measured "
        f"{_range(results['orders'], 'gap_slope')} and {_range(results['orders'], 'corrected_slope')}."
    )
    orders = results["orders"]
    cells = [
        [f"{row['alpha']:.2f}", str(row["epochs"]), *(f"{row[f'{name}_slope']:.3f}" for name in ("gap", "corrected"))]
        for row in orders
    ]
    yield Table(
        ["α", "epochs", "slope of the gap (expected 2)", "slope of the remainder (expected 3)"],
        cells,
        "Observed orders in η",
    )
    last = orders[-1]
    lines = {
        "‖gap‖": [(gap["eta"], gap["gap"]) for gap in last["gaps"]],
        "without the term": [(gap["eta"], gap["residual"]) for gap in last["gaps"]],
    }
    axes = Axis("η", log=True), Axis("norm", log=True)
    title = f"{last['epochs']} epochs, α = {last['alpha']:.2f}"
    yield Figure(
        "theory_orders", "Gap between task arithmetic and joint training by step size", [Lines(lines, *axes, title)]
    )
    if small := results.get("small"):
        yield from _small(small)
    if results.get("merging"):
        yield from _merging(results)


def _range(rows: list[Mapping[str, Any]], key: str) -> str:
    found = [row[key] for row in rows]
    return f"{min(found):.2f} to {max(found):.2f}"


def _small(small: Mapping[str, Any]) -> Iterator[Part]:
    """The term and the bound as the thesis prints them, and as they follow."""
    steps = [gap["eta"] for gap in small["orders"][0]["gaps"]]
    cells = [
        [f"{row['alpha']:.2f}", str(row["epochs"])]
        + [f"{row[f'{name}_slope']:.3f}" for name in ("gap", "printed", "corrected")]
        for row in small["orders"]
    ]
    columns = ["α", "epochs", "gap", "after the printed +η²C", "after −αη²C"]
    caption = (
        "Slopes of log norm against log η of a tanh network 5–7–3 on three tasks of random points, η from "
        f"{max(steps):g} down to {min(steps):g}; a term that explains the gap leaves 3"
    )
    yield Table(columns, cells, caption)
    rows = small["bounds"]
    below = [row["network"] for row in rows if row["printed_c"] < row["c"]]
    fails = [row["network"] for row in rows if row["corrected_c"] < row["c"]]
    over = [row["corrected_c"] / row["c"] for row in rows]
    yield Text(
        f"We compare the bounds on ‖C‖ with the measured norm on {len(rows)} such networks without biases. The printed "
        f"bound is below the norm on {len(below)}, the corrected bound on {len(fails)}. The corrected bound exceeds "
        f"the norm by factors of {min(over):.0f} to {max(over):.0f}."
    )
    keys = [f"{way}{key}" for key in ("c", "hessian", "gradient") for way in ("", "printed_", "corrected_")]
    cells = [[row["network"], f"{row['alpha']:.2f}", *(_short(row[key]) for key in keys)] for row in rows]
    columns = ["network", "α"]
    for name in ("‖C‖", "largest ‖H‖", "largest ‖g‖"):
        columns += [name, "printed", "corrected"]
    caption = f"Measured norms and their bounds, {rows[0]['epochs']} epochs, η = {rows[0]['eta']:g}"
    yield Table(columns, cells, caption)


def _short(value: float) -> str:
    """Three significant places; what is nothing but rounding is 0."""
    if abs(value) < 1e-10:
        return "0"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _merging(results: Mapping[str, Any]) -> Iterator[Part]:
    merging = {row["experts"]: row for row in results["merging"]}
    early, late = merging["first epoch"], merging["last epoch"]
    epochs = sorted(set(results["epochs"].values()))
    count = " or ".join(WORDS.get(each, str(each)) for each in epochs)
    sentences = results["sentences"]
    each = " or ".join(map(str, sorted(set(sentences.values()))))
    gap = early["normalised"] - late["normalised"]
    around = error(early, late, sentences)
    order = "ahead of" if gap > 0 else "behind"
    yield Text(
        f"Text experts were trained for {count} epochs. If they are merged by task arithmetic after one epoch, they "
        f"reach {percent(early['normalised'])} % of the accuracy that the experts have after {count}. This is "
        f"{100 * abs(gap):.1f} points {order} the merge of the final experts ({percent(late['normalised'])} %). One "
        f"standard error of the difference, with both taken as independent on {each} test sentences of each task, is "
        f"{percent(around)} points: the difference is {against(gap, around)}. The early experts themselves reach "
        f"{percent(early['own_normalised'])} %."
    )
    names = {"first epoch": "after one epoch", "last epoch": f"after {count}"}
    cells = [
        [
            names[name],
            f"{row['alpha']:g}",
            percent(row["own"]),
            percent(row["accuracy"]),
            percent(row["normalised"]),
        ]
        for name, row in merging.items()
    ]
    caption = f"{len(sentences)} text experts, {each} test sentences of each task"
    yield Table(["experts", "α", "experts alone, %", "merged, %", "merged, normalised, %"], cells, caption)
    cells = [
        [row["task"], f"{row['cosine']:.3f}", percent(row["first_share"]), f"{row['straightness']:.3f}"]
        for row in results["trajectories"]
    ]
    columns = [
        "task",
        "cosine of first and last task vector",
        f"share of the first of {count} epochs in the path, %",
        "straightness",
    ]
    yield Table(columns, cells, f"How well the first epoch predicts the direction of all {count}")


def error(early: Mapping[str, Any], late: Mapping[str, Any], sentences: Mapping[str, int]) -> float:
    """Of the difference of two normalised accuracies, as if of other sentences; normalised by the mean's factor."""
    total = 0.0
    for row in (early, late):
        factor = row["normalised"] / row["accuracy"]
        total += sum(p * (1 - p) / sentences[task] for task, p in row["per_task"].items()) * factor**2
    return math.sqrt(total) / len(sentences)
