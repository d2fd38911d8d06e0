"""One question each about networks of one task: barriers, chance, references, orders, starts, planes, cycles, likeness,
subsets, ensembles, clients, transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import number, percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Plane, Table, Text


def mlps(results: Mapping[str, Any]) -> Iterator[Part]:
    yield Text("One small table for each question, with MLPs on MNIST (five, unless a caption says otherwise).")
    yield from _answers(results)


def resnets(results: Mapping[str, Any]) -> Iterator[Part]:
    count = len(results["references"]) - 1 if "references" in results else 2
    yield Text(
        f"One small table for each question, with {count} ResNet20 on CIFAR-10 and BatchNorm statistics recomputed for "
        "every merge unless a row says otherwise."
    )
    yield from _answers(results)


def _answers(results: Mapping[str, Any]) -> Iterator[Part]:
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
    name = "single_task_barriers" if "MLP" in found else "single_task_barriers_resnet20-bn"
    yield Figure(name, "Test loss between two networks before and after matching", panels)


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


def references(found: Mapping[str, Mapping[str, float]]) -> Iterator[Part]:
    accuracies = [row["accuracy"] for name, row in found.items() if name != "C²M³"]
    yield Text(
        f"The accuracy is {percent(min(accuracies))} to {percent(max(accuracies))} %, depending on the model that the "
        f"others are matched to. C²M³ needs no such choice and has {percent(found['C²M³']['accuracy'])} %."
    )
    yield _objectives(found, "reference", "Every model as the one that all others are matched to")


def orders(found: Mapping[str, Mapping[str, float]]) -> Iterator[Part]:
    yield _objectives(found, "order", "One model after another, each matched to the mean of those before it")


def _objectives(found: Mapping[str, Mapping[str, float]], title: str, caption: str) -> Table:
    rows = [[name, f"{row['objective']:.2f}", percent(row["accuracy"])] for name, row in found.items()]
    return Table([title, "objective", "accuracy, %"], rows, caption)


def starts(found: Mapping[str, Mapping[str, float]]) -> Iterator[Part]:
    rows = [
        [
            {"sinkhorn": "random points (Sinkhorn)", "propagate": "propagated (the default)"}.get(name, name),
            number(row["runs"]),
            f"{row['objective']:.2f}" + (f" ± {row['objective_std']:.2g}" if row["runs"] > 1 else ""),
            percent(row["accuracy"], 2) + (f" ± {percent(row['accuracy_std'], 2)}" if row["runs"] > 1 else ""),
            f"{row['iterations']:.0f}",
        ]
        for name, row in found.items()
    ]
    yield Table(["start", "runs", "objective", "accuracy, %", "iterations"], rows, "C²M³ of all networks by its start")


def planes(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Part]:
    panels = [
        Plane(plane["xs"], plane["ys"], plane["accuracies"], [tuple(corner) for corner in plane["corners"]], name)
        for name, plane in found.items()
    ]
    yield Figure("single_task_planes", "Test accuracy over the plane through three networks (the white points)", panels)


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
    epochs = list(dict.fromkeys(name.split(": ")[1] for name in found))

    def said(start: str, way: str, key: str) -> str:
        return " / ".join(percent(found[f"{start}: {local}: {way}"][key]) for local in epochs)

    aligned = "aligned in a universe"
    yield Text(
        f"The clients are small: alone, they reach {said('different', 'clients alone', rounds[0])} % after "
        f"{' / '.join(epochs)} local epochs, with chance at 10 %, so that few epochs say little. From different "
        f"initialisations, round {len(rounds)} has {said('different', 'FedAvg', rounds[-1])} % with FedAvg and "
        f"{said('different', aligned, rounds[-1])} % with clients aligned in a universe. From the same initialisation "
        f"it has {said('same', 'FedAvg', rounds[-1])} % and {said('same', aligned, rounds[-1])} %."
    )
    rows = [
        [*name.split(": "), *(percent(row.get(key)) for key in rounds), percent(row.get("spread"))]
        for name, row in found.items()
    ]
    columns = ["initialisation", "local epochs", "", *(key.replace("_", " ") for key in rounds), "± in the last"]
    yield Table(
        columns,
        rows,
        "Ten clients with small CNNs, 200 images of CIFAR-10 each on average (16 × 16 pixels): accuracy by round, %, "
        "averaged over two seeds with their deviation",
    )


def transport(found: Mapping[str, Mapping[str, float]]) -> Iterator[Part]:
    rows = [[*name.split(": ", 1), percent(row["new_task"]), percent(row["old_task"])] for name, row in found.items()]
    columns = ["task", "network", "new task, %", "old task, %"]
    yield Table(columns, rows, "A task vector learned on one base, applied to another (one pair of networks)")


QUESTIONS: dict[str, Callable[[Any], Iterator[Part]]] = {
    "barriers": barriers,
    "seeds": seeds,
    "references": references,
    "orders": orders,
    "starts": starts,
    "planes": planes,
    "cycles": cycles,
    "similarity": similarity,
    "subsets": subsets,
    "ensembles": ensembles,
    "federated": federated,
    "transport": transport,
}
