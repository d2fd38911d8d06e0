"""One question each about networks of one task: barriers, chance, references, orders, starts, planes, cycles, likeness,
subsets, ensembles, clients, transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.answers import Score
from benchmarks.reporting.formats import number, percent, points
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Plane, Table, Text

FEDAVG = "FedAvg"


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


def sampled(networks: str, results: Mapping[str, Any]) -> Iterator[Part]:
    count = results["ensembles"]["ensemble of the models"]["networks"]
    yield Text(
        f"{count:.0f} {networks}. Samples are convex combinations of the networks, drawn from a uniform distribution, "
        "and an ensemble takes the mean of the predicted probabilities. REPAIR uses 1,000 training images."
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
    yield Table(columns, rows, "Barriers on the straight line between the first two networks")
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


def federated(found: Mapping[str, Any]) -> Iterator[Part]:
    """Clients from the same and from different initialisations; ways to average are compared repeat by repeat."""
    runs = {tuple(name.split(": ")): np.array(scores) for name, scores in found["runs"].items()}
    epochs = list(dict.fromkeys(local for _, local, _ in runs))
    repeats, rounds = runs["same", epochs[0], FEDAVG].shape
    aligned = [way for start, local, way in runs if (start, local) == ("same", epochs[0]) and way.startswith("aligned")]

    def ahead(start: str, local: str, way: str) -> Score:
        return Score.of(runs[start, local, way][:, -1] - runs[start, local, FEDAVG][:, -1])

    def said(start: str, way: str) -> str:
        return " / ".join(percent(runs[start, local, way][:, -1].mean()) for local in epochs)

    gains = "; ".join(
        f"{' / '.join(points(ahead('different', local, way)) for local in epochs)} points with clients {way}"
        for way in aligned
    )
    same = all(np.array_equal(runs["same", n, way], runs["same", n, FEDAVG]) for n in epochs for way in aligned)
    yield Text(
        f"Ten clients with small CNNs have {found['images'] // 10} images of CIFAR-10 each on average, halved to "
        f"16 × 16 pixels; alone, they reach {said('different', 'clients alone')} % after {' / '.join(epochs)} local "
        f"epochs, with chance at 10 %. From different initialisations, FedAvg has {said('different', FEDAVG)} % after "
        f"round {rounds}, and alignment changes this by {gains} (paired over {repeats} repeats with other data, "
        f"initialisations and batches, ± one standard error; bold: more than two of them). From the same "
        f"initialisation, FedAvg has {said('same', FEDAVG)} %"
        + (", and alignment changes nothing: clients that start together stay aligned." if same else ".")
    )
    rows = [
        [
            start,
            local,
            way,
            *(percent(score) for score in scores.mean(0)),
            *["–"] * (rounds - scores.shape[1]),
            percent(Score.of(scores[:, -1]).error),
            points(ahead(start, local, way)) if way in aligned else "–",
        ]
        for (start, local, way), scores in runs.items()
    ]
    columns = ["initialisation", "local epochs", "", *(f"round {turn}" for turn in range(1, rounds + 1))]
    yield Table(
        [*columns, "± one standard error of the last", f"above {FEDAVG}, points"],
        rows,
        f"Ten clients: accuracy by round, %, averaged over {repeats} repeats",
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
