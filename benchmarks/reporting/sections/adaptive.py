"""Input-adaptive models: MASS, its routers, and the baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import number, percent
from benchmarks.reporting.parts import Axis, Bars, Figure, Lines, Part, Table, Text


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    models, fine = results["models"], results["fine_tuned"]
    known = {name: row["label_normalised"] for name, row in models.items() if "label_normalised" in row}
    mass = {name: value for name, value in known.items() if name.startswith("MASS")}
    rest = {name: value for name, value in known.items() if name not in mass}
    best, other = max(mass, key=lambda name: mass[name]), max(rest, key=lambda name: rest[name])
    yield Text(
        f"{len(fine)} MiniLM experts, {results['samples']} test sentences of each task, given without the task; the "
        f"experts themselves reach {percent(sum(fine.values()) / len(fine))} % on average. Normalised accuracy under "
        "three rules: the model is told the task; it is not, and the label must be right (polarity tasks share "
        "theirs); it is not, and task and label must both be right. Of the labels MASS keeps at best "
        f"{percent(mass[best])} % ({best}), other models {percent(rest[other])} % ({other})."
    )
    yield _models(models, "Normalised accuracy, %; share of tasks found, %; multiply-adds over one forward pass")
    rules = {"label right": "label_normalised", "task and label right": "pair_normalised"}
    bars = Bars(
        list(known),
        {label: [models[name].get(key) for name in known] for label, key in rules.items()},
        Axis("normalised accuracy, task unknown", percent=True),
        dots=True,
    )
    yield Figure("adaptive_models", "Normalised accuracy of input-adaptive models, task unknown", [bars])
    if distinct := results.get("distinct"):
        yield _models(distinct["models"], f"The same among tasks that differ: {', '.join(distinct['fine_tuned'])}")
    yield from _costs(results)
    yield from _sensitivity(results)


def _models(models: Mapping[str, Mapping[str, Any]], caption: str) -> Table:
    keys = ("told_normalised", "label_normalised", "pair_normalised", "task", "task_top3")
    rows = [
        [name, *(percent(row.get(key)) for key in keys), number(row.get("forwards"))] for name, row in models.items()
    ]
    columns = ["", "told the task", "label right", "task and label right", "task found", "among first 3", "forwards"]
    return Table(columns, rows, caption)


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
    if tuned := results.get("tuned"):
        chosen = ", ".join(f"{name} {value}" for name, value in tuned["settings"].items())
        yield Text(
            f"Chosen on validation sentences: the first {percent(tuned['share'], 0)} % of the layers, {chosen}; the "
            f"single layer that finds most tasks is `{tuned['layer']}`."
        )
    panels = []
    choices = results.get("threshold_and_top", ())
    if choices:
        tops = sorted({row["top"] for row in choices})
        rows = [
            [f"{row['threshold']:.2f}", str(row["top"]), percent(row["accuracy"]), f"{row['set_size']:.2f}"]
            for row in choices
        ]
        yield Table(["η", "K", "label right, %", "experts chosen"], rows, "Sensitivity to threshold η and top K")
        lines = {f"K = {k}": [(r["threshold"], r["accuracy"]) for r in choices if r["top"] == k] for k in tops}
        panels.append(Lines(lines, Axis("threshold η"), Axis("label right", percent=True)))
    if filters := results.get("redundancy", ()):
        rows = [
            [f"{row['redundancy']:.2f}", str(len(row["accepted"])), percent(row["accuracy"])]
            for row in sorted(filters, key=lambda row: row["redundancy"])
        ]
        yield Table(["ε", "experts accepted", "task found, %"], rows, "Sensitivity to the redundancy filter ε")
    if layers := results.get("layers", ()):
        found = [(place, row["accuracy"]) for place, row in enumerate(layers) if row["accuracy"] is not None]
        axes = Axis("layer, in the order of the encoder"), Axis("task found", percent=True)
        panels.append(Lines({"one layer": found}, *axes))
    if panels:
        yield Figure(
            "adaptive_sensitivity", "Accuracy of MASS by threshold and top K, and tasks found by layer", panels
        )
