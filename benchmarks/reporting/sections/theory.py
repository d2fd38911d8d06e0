"""Task vectors as gradients: one-epoch equality, orders of the gap, early against late merging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    worst = max(row["relative"] for row in results["one_epoch"])
    yield Text(
        "A small tanh network on handwritten digits in float64, full-batch gradient descent: after one epoch, task "
        f"arithmetic and one joint step are the same weights up to {worst:.0e} of the distance travelled. After more "
        "epochs they part by −αη²C + O(η³) ([theory](theory.md)): the gap has slope 2 in η on log-log axes, and what "
        "is left once the term is taken off has slope 3."
    )
    orders = results["orders"]
    cells = [
        [f"{row['alpha']:.2f}", str(row["epochs"]), *(f"{row[f'{name}_slope']:.3f}" for name in ("gap", "corrected"))]
        for row in orders
    ]
    yield Table(["α", "epochs", "slope of the gap (2)", "slope of the rest (3)"], cells, "Observed orders in η")
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
    if results.get("merging"):
        yield from _merging(results)


def _merging(results: Mapping[str, Any]) -> Iterator[Part]:
    merging = {row["experts"]: row for row in results["merging"]}
    early, late = merging["epoch 1"], merging["converged"]
    better = "ahead of" if early["normalised"] > late["normalised"] else "behind"
    yield Text(
        f"Text experts merged by task arithmetic as they were after one epoch reach {percent(early['normalised'])} % "
        f"of the converged experts' accuracy, {better} the merge of the converged ones "
        f"({percent(late['normalised'])} %). The early experts themselves are at {percent(early['own_normalised'])} %."
    )
    cells = [
        [
            name,
            f"{row['alpha']:g}",
            percent(row["own"]),
            percent(row["accuracy"]),
            percent(row["normalised"]),
        ]
        for name, row in merging.items()
    ]
    yield Table(["experts", "α", "experts alone, %", "merged, %", "merged, normalised, %"], cells)
    cells = [
        [row["task"], f"{row['cosine']:.3f}", percent(row["first_share"]), f"{row['straightness']:.3f}"]
        for row in results["trajectories"]
    ]
    columns = ["task", "cosine of first and last task vector", "first epoch's share of the path, %", "straightness"]
    yield Table(columns, cells, "How far the first epoch points to the end")
