"""One question each about networks of one task: barriers, chance, cycles, likeness, subsets, ensembles, clients,
transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import number, percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    yield Text("One small table for each question, with MLPs on MNIST (five, unless a caption says otherwise).")
    for name, make in QUESTIONS.items():
        if name in results:
            yield from make(results[name])


def barriers(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Part]:
    rows = [
        [network, way, number(curve["barrier"]), percent(curve["midpoint_accuracy"]), percent(curve["lowest_accuracy"])]
        for network, curves in found.items()
        for way, curve in curves.items()
    ]
    columns = ["network", "second network", "loss barrier", "accuracy halfway, %", "lowest accuracy, %"]
    yield Table(columns, rows, "Barriers on the straight line between two networks")
    panels = [
        Lines(
            {way: list(zip(curve["positions"], curve["losses"], strict=True)) for way, curve in curves.items()},
            Axis("position between the two"),
            Axis("test loss"),
            network,
        )
        for network, curves in found.items()
    ]
    yield Figure("single_task_barriers", "Test loss between two networks before and after matching", panels)


def seeds(found: Mapping[str, Mapping[str, float]]) -> Iterator[Part]:
    rows = [
        [
            name,
            number(row["runs"]),
            f"{row['objective']:.2f} ± {row['objective_std']:.2g}",
            f"{percent(row['accuracy'], 2)} ± {percent(row['accuracy_std'], 2)}",
            f"{percent(row['lowest_accuracy'], 2)} – {percent(row['highest_accuracy'], 2)}",
        ]
        for name, row in found.items()
    ]
    ranked = sorted(found, key=lambda name: found[name]["accuracy"], reverse=True)
    if ranked[0] != max(found, key=lambda name: found[name]["objective"]):
        yield Text(
            f"Here a higher objective does not mean a higher accuracy: {ranked[0]} is ahead of {ranked[1]} halfway."
        )
    columns = ["", "runs", "objective", "accuracy halfway, %", "lowest – highest, %"]
    yield Table(columns, rows, "Spread of the same match over seeds; C²M³ draws nothing at random")


def cycles(found: Mapping[str, Mapping[str, float]]) -> Iterator[Part]:
    rows = [
        [name, number(row["distance"]), number(row["largest_distance"]), percent(row["units_back"])]
        for name, row in found.items()
    ]
    columns = ["maps", "distance from the start", "largest", "units back in place, %"]
    yield Table(
        columns,
        rows,
        "Walks a → b → c → a through pairwise maps of at most four networks, relative to the model's norm",
    )


def similarity(found: Mapping[str, Mapping[str, float]]) -> Iterator[Part]:
    keys = list(next(iter(found.values())))
    rows = [[name, *(number(row[key]) for key in keys)] for name, row in found.items()]
    yield Table(
        ["", *(key.replace("output", "third layer").replace("_", ", ") for key in keys)],
        rows,
        "How similar the networks are, averaged over pairs",
    )


def subsets(found: Mapping[str, Mapping[str, float]]) -> Iterator[Part]:
    rows = [
        [
            name,
            number(row["subsets"]),
            percent(row["joint_accuracy"]),
            percent(row["separate_accuracy"]),
            percent(row["joint_lowest"]),
            percent(row["separate_lowest"]),
            f"{row['objective_ratio']:.3f}",
        ]
        for name, row in found.items()
    ]
    columns = [
        "",
        "subsets",
        "jointly, %",
        "alone, %",
        "jointly, lowest",
        "alone, lowest",
        "objective, jointly / alone",
    ]
    yield Table(columns, rows, "Means of subsets, matched jointly with all models or alone")


def ensembles(found: Mapping[str, Mapping[str, float]]) -> Iterator[Part]:
    rows = [[name, percent(row["accuracy"], 2), f"{row['networks']:.0f}"] for name, row in found.items()]
    yield Table(["", "accuracy, %", "networks that run"], rows, "Ensembles sampled in the universe")


def federated(found: Mapping[str, Mapping[str, float]]) -> Iterator[Part]:
    rounds = list(dict.fromkeys(key for row in found.values() for key in row if key.startswith("round_")))
    rows = [
        [name, *(percent(row.get(key)) for key in rounds), percent(row.get("spread"))] for name, row in found.items()
    ]
    columns = ["", *(key.replace("_", " ") for key in rounds), "± in the last"]
    yield Table(
        columns,
        rows,
        "Ten clients, each with its own initialisation and digits (of scikit-learn): accuracy by round, %",
    )


def transport(found: Mapping[str, Mapping[str, float]]) -> Iterator[Part]:
    rows = [[*name.split(": ", 1), percent(row["new_task"]), percent(row["old_task"])] for name, row in found.items()]
    columns = ["task", "network", "new task, %", "old task, %"]
    yield Table(columns, rows, "A task vector learned on one base, applied to another (one pair of networks)")


QUESTIONS: dict[str, Callable[[Any], Iterator[Part]]] = {
    "barriers": barriers,
    "seeds": seeds,
    "cycles": cycles,
    "similarity": similarity,
    "subsets": subsets,
    "ensembles": ensembles,
    "federated": federated,
    "transport": transport,
}
