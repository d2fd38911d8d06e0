"""Experts in few bytes: what is kept of them against what they take."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text

NAMES = """
**Codes** are those of `library build --budget`: for every tensor the code (signs, levels, mixed-bit factors, a shared
part) that lowers the error of the weights most per byte. *Signs*, *levels* and *mixed factors* alone store every matrix
in the same code and vectors in eight bits. **TSV-C** keeps the largest singular components of every task matrix (expert
minus base): a share of them (`rank`), or as many as a byte budget allows. **TALL masks** and **EMR** keep one vector
that all experts share and one bit for each weight of each expert. TALL switches on the weights where the expert's
change is more than κ times as large as what the others add to the shared sum, so a larger κ gives sparser masks. With
*TIES*, the shared vector is the sum of what TIES leaves of the task vectors (density 0.2). EMR switches on those where
the change has the sign of the shared vector, and then rescales. Rounded task vectors show the effect of low precision
alone.
"""


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    rows, experts = results["rows"], results["experts"]
    own = sum(experts.values()) / len(experts)
    around = error(experts, results["sentences"])
    stored = [row for row in rows if row["method"] != "experts as trained"]
    away = [row for row in stored if abs(row["normalised"] - 1) > around]
    yield Text(
        f"{len(experts)} MiniLM experts are stored in several ways, rebuilt, and scored on test sentences of their own "
        f"tasks (as trained: {percent(own)} % on average). Unless a column says otherwise, bytes count the tensors "
        f"that training changed, {results['trained_bytes'] / 2**20:.0f} MiB in float32; with the frozen ones, a "
        f"checkpoint has {results['base_bytes'] / 2**20:.0f} MiB. One standard error of a normalised accuracy over "
        f"{sum(results['sentences'].values())} sentences is {percent(around)} points. {_outside(away, len(stored))}"
    )
    if len(experts) < 20:  # the section of twenty follows that of eight
        yield Text(NAMES)
    yield Text(" ".join(_verdict(goal, stored) for goal in GOALS[len(experts)]))
    cells = [
        [
            row["method"],
            row["setting"],
            row["dtype"],
            f"{row['ratio']:.2f}×",
            f"{row['per_expert']:.3f}×",
            f"1/{round(results['base_bytes'] * len(experts) / row['bytes'])}",
            percent(row["accuracy"]),
            percent(row["normalised"]),
        ]
        for row in rows
    ]
    columns = ["", "setting", "stored as", "all, of the trained", "each, of the trained", "each, of a checkpoint"]
    columns += ["accuracy, %", "normalised, %"]
    yield Table(
        columns, cells, "Bytes and accuracy; normalised: in percent of the experts' own accuracy, averaged over tasks"
    )
    families: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row['method']} {row['dtype']}" if row["method"].startswith("TSV") else row["method"]
        families.setdefault(name, []).append((row["ratio"], row["normalised"]))
    panel = Lines(
        {name: sorted(points) for name, points in families.items()},
        Axis("bytes of base and experts over the base", log=True),
        Axis("normalised accuracy,\n% of the experts'", percent=True),
        levels={"one standard error more": 1 + around, "one standard error less": 1 - around},
        scatter=True,
    )
    picture = "compression_20" if len(experts) == 20 else "compression"
    yield Figure(picture, "Accuracy kept against bytes stored; between the lines is one standard error", [panel])


@dataclass(frozen=True)
class Goal:
    """What share of the experts' accuracy is to be kept, in how few bytes."""

    share: float
    bytes: str
    small: Callable[[Mapping[str, Any]], bool]


TWICE = Goal(0.99, "2× the trained tensors", lambda row: row["ratio"] <= 2.005)
HUNDREDTH = Goal(0.995, "1/100 of a checkpoint for each expert", lambda row: row.get("largest", 1.0) <= 0.01)
THIRD = Goal(0.99, "1.3× the checkpoint of the base for all", lambda row: row["ratio_to_base"] <= 1.3)
WHOLE = Goal(0.99, "2× the checkpoint of the base for all", lambda row: row["ratio_to_base"] <= 2)
GOALS: Mapping[int, Sequence[Goal]] = defaultdict(lambda: (TWICE,), {8: (TWICE, HUNDREDTH), 20: (WHOLE, THIRD)})


def _verdict(goal: Goal, stored: Sequence[Mapping[str, Any]]) -> str:
    """Return whether some way to store them reaches a goal, and the smallest or the best one."""
    told = f"Goal: {percent(goal.share)} % of the experts' accuracy in at most {goal.bytes}."
    small = [row for row in stored if goal.small(row)]
    if not small:
        return f"{told} Nothing here is that small: not met."
    good = [row for row in small if row["normalised"] >= goal.share]
    row = min(good, key=lambda row: row["bytes"]) if good else max(small, key=lambda row: row["normalised"])
    name = " ".join(filter(None, (row["method"], row["setting"], row["dtype"])))
    which = "smallest that reaches it" if good else "best of this size"
    return (
        f"{told} The {which} is {name} with {percent(row['normalised'])} % in {row['ratio']:.2f}× the trained tensors, "
        f"{row['ratio_to_base']:.2f}× the checkpoint: {'met' if good else 'not met'}."
    )


def error(experts: Mapping[str, float], sentences: Mapping[str, int]) -> float:
    """Of a normalised accuracy near that of the experts: sentences are drawn, tasks and experts are given."""
    found = (p * (1 - p) / sentences[task] / p**2 for task, p in experts.items() if p)
    return math.sqrt(math.fsum(found)) / len(experts)


def _outside(away: list[Mapping[str, Any]], count: int) -> str:
    if not away:
        ways = f"All {count} ways stay" if count > 1 else "It stays"
        return f"{ways} within one standard error of the experts."
    names = ", ".join(
        f"{' '.join(filter(None, (row['method'], row['setting'], row['dtype'])))} ({percent(row['normalised'])} %)"
        for row in away
    )
    return f"Of {count} ways, {count - len(away)} stay within one standard error of the experts. These do not: {names}."
