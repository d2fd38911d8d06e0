"""Experts in few bytes: what is kept of them against what they take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text

NAMES = """
**TSV-C** keeps the largest singular components of every task vector's matrices (expert minus base), a share of them
(`rank`) or as many as a budget of bytes allows. **TALL masks** and **EMR** keep one vector that all experts share and a
bit for each weight of each expert: TALL switches on the weights where the expert's change is more than κ times as large
as what the others add to the shared sum, so that a larger κ gives sparser masks; EMR those where its change has the
sign of the shared vector, which it then rescales. Rounded task vectors are what low precision alone gives.
"""


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    rows, experts = results["rows"], results["experts"]
    own = sum(experts.values()) / len(experts)
    around = error(experts, results["sentences"])
    stored = [row for row in rows if row["method"] != "experts as trained"]
    away = [row for row in stored if abs(row["normalised"] - 1) > around]
    yield Text(
        f"{len(experts)} MiniLM experts stored several ways, rebuilt, and scored on test sentences of their own tasks "
        f"(as trained: {percent(own)} % on average). Bytes are of the tensors that training changed, "
        f"{results['trained_bytes'] / 2**20:.0f} MiB of them in float32; the frozen ones would flatter every "
        "ratio. The ratio is of base and all experts to the base alone. One standard error of a normalised accuracy "
        f"over {sum(results['sentences'].values())} sentences is {percent(around)} points: "
        f"{_outside(away, len(stored))}"
    )
    yield Text(NAMES)
    yield Text(_goal(stored, len(experts)))
    cells = [
        [
            row["method"],
            row["setting"],
            row["dtype"],
            f"{row['ratio']:.2f}×",
            f"{row['per_expert']:.3f}×",
            percent(row["accuracy"]),
            percent(row["normalised"]),
        ]
        for row in rows
    ]
    columns = ["", "setting", "stored as", "all, of the base", "each, of the base", "accuracy, %", "normalised, %"]
    yield Table(
        columns, cells, "Bytes and accuracy; normalised: in percent of the experts' own accuracy, mean of tasks"
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
    yield Figure("compression", "Accuracy kept against bytes stored; between the lines is one standard error", [panel])


def _goal(stored: list[Mapping[str, Any]], count: int) -> str:
    """Whether all experts keep 99 % in twice the bytes of one."""
    small = [row for row in stored if row["ratio"] <= 2.005]
    if not small:
        return "Goal: 99 % in at most 2×. Nothing here is that small: not met."
    best = max(small, key=lambda row: row["normalised"])
    name = " ".join(filter(None, (best["method"], best["setting"], best["dtype"])))
    verdict = "met" if best["normalised"] >= 0.99 else "not met"
    later = "" if count == 20 else f" This is for {count} experts; 20 are not measured yet."
    return (
        f"Goal: 99 % of the experts' accuracy in at most 2×. The best that small is {name} with "
        f"{percent(best['normalised'])} % in {best['ratio']:.2f}×: {verdict}.{later}"
    )


def error(experts: Mapping[str, float], sentences: Mapping[str, int]) -> float:
    """Of a normalised accuracy near that of the experts: sentences are drawn, tasks and experts are given."""
    found = (p * (1 - p) / sentences[task] / p**2 for task, p in experts.items() if p)
    return math.sqrt(math.fsum(found)) / len(experts)


def _outside(away: list[Mapping[str, Any]], count: int) -> str:
    if not away:
        return f"all {count} ways to store them stay within it of the experts."
    names = ", ".join(
        f"{' '.join(filter(None, (row['method'], row['setting'], row['dtype'])))} ({percent(row['normalised'])} %)"
        for row in away
    )
    return (
        f"of {count} ways to store them {count - len(away)} stay within it of the experts; "
        f"farther off {'is' if len(away) == 1 else 'are'} {names}."
    )
