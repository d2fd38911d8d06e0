"""Input-adaptive models: MASS, its routers, and the baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import number, percent
from benchmarks.reporting.parts import Axis, Bars, Figure, Lines, Part, Table, Text


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    models = results["models"]
    fine = results["fine_tuned"]
    yield Text(
        f"{len(fine)} MiniLM experts, {results['samples']} test sentences of each task; the experts themselves reach "
        f"{percent(sum(fine.values()) / len(fine))} % on average. Normalised accuracy in %, under three rules: the "
        "model is told the task; it is not, and the label must be right (polarity tasks share theirs); it is not, and "
        "task and label must both be right."
    )
    rows = [
        [
            name,
            *(percent(row.get(f"{rule}_normalised")) for rule in ("told", "label", "pair")),
            percent(row.get("task")),
            percent(row.get("task_top3")),
            number(row.get("forwards")),
        ]
        for name, row in models.items()
    ]
    columns = ["", "told the task", "label right", "task and label right", "task found", "among first 3", "forwards"]
    yield Table(columns, rows, "Normalised accuracy, %; share of tasks found; multiply-adds over one forward pass")
    names = [name for name, row in models.items() if "label_normalised" in row]
    bars = Bars(
        names,
        {"label right": [models[name]["label_normalised"] for name in names]},
        Axis("normalised accuracy, task unknown", percent=True),
        label="{:.1%}",
    )
    yield Figure("adaptive_models", "Normalised accuracy of input-adaptive models, task unknown", [bars])
    yield from _costs(results)
    yield from _sensitivity(results)


def _costs(results: Mapping[str, Any]) -> Iterator[Part]:
    steps = ("first_pass", "router", "second_pass", "switch", "ratio")
    rows = [
        [name, kind.replace("_", ", "), *(f"{cost[step]:.2f}" for step in steps)]
        for name, kinds in results.get("costs", {}).items()
        for kind, cost in kinds.items()
    ]
    if rows:
        columns = ["", "inputs", "first pass", "router", "second pass", "switch", "in all"]
        yield Table(columns, rows, "Multiply-adds of MASS over those of one forward pass")
    rows = [
        [dtype, f"{row['relative']:.2f}×", f"{row['relative_to_trained']:.2f}×", percent(row["told_normalised"])]
        for dtype, row in results.get("stored", {}).items()
    ]
    if rows:
        columns = ["factors", "numbers, of the base's", "bytes, of the trained tensors'", "experts kept, %"]
        yield Table(columns, rows, "What is stored, and what is left of the experts")


def _sensitivity(results: Mapping[str, Any]) -> Iterator[Part]:
    choices = results.get("threshold_and_top", ())
    if choices:
        tops = sorted({row["top"] for row in choices})
        lines = {f"K = {k}": [(r["threshold"], r["accuracy"]) for r in choices if r["top"] == k] for k in tops}
        rows = [
            [f"{row['threshold']:.2f}", str(row["top"]), percent(row["accuracy"]), f"{row['set_size']:.2f}"]
            for row in choices
        ]
        yield Table(["η", "K", "label right, %", "experts chosen"], rows, "Sensitivity to threshold η and top K")
        axes = Axis("threshold η"), Axis("label right", percent=True)
        yield Figure("adaptive_sensitivity", "Accuracy of MASS by threshold and top K", [Lines(lines, *axes)])
    if filters := results.get("redundancy", ()):
        rows = [
            [f"{row['redundancy']:.2f}", str(len(row["accepted"])), percent(row["accuracy"])]
            for row in sorted(filters, key=lambda row: row["redundancy"])
        ]
        yield Table(["ε", "experts accepted", "task found, %"], rows, "Sensitivity to the redundancy filter ε")
