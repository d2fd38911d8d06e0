"""Experts in few bytes: what is kept of them against what they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent, standard_error
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    rows = results["rows"]
    experts = results["experts"]
    own = sum(experts.values()) / len(experts)
    yield Text(
        f"{len(experts)} MiniLM experts stored several ways, rebuilt, and scored on test sentences of their own tasks "
        f"(as trained: {percent(own)} % on average). Bytes are of the tensors that training changed, "
        f"{results['trained_bytes'] / 2**20:.0f} MiB of them in float32; the frozen embeddings would flatter every "
        "ratio. The ratio is of base and all experts to the base alone. One standard error of an accuracy is "
        f"{standard_error(own, sum(results['sentences'].values()))} points, so that most rows cannot be told apart."
    )
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
    yield Table(columns, cells)
    families: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row['method']} {row['dtype']}" if row["method"].startswith("TSV") else row["method"]
        families.setdefault(name, []).append((row["ratio"], row["normalised"]))
    lines = {name: sorted(points) for name, points in families.items()}
    panel = Lines(lines, Axis("bytes of base and experts over the base", log=True), Axis("normalised", percent=True))
    yield Figure("compression", "Accuracy kept against bytes stored", [panel])
