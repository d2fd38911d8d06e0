"""Singular task interference of experts in one encoder: totals by number of tasks, and by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import amount, percent, rounding
from benchmarks.reporting.parts import Part, Table, Text


def totals(rows: list[Mapping[str, Any]], scores: Mapping[int, Mapping[str, float]]) -> Iterator[Part]:
    """Interference of each number of tasks in both definitions, beside normalised accuracies by method."""
    yield Text(
        "Singular task interference is STI = ‖(UᵀU − I) Σ (VᵀV − I)‖₁, entrywise, of the experts' singular vectors "
        "side by side, summed over matrices. It is 0 if no two experts share a direction. *Truncated* STI uses the "
        "first n/T components of each expert, which TSV-M orthogonalises; *full* STI uses all of them, as the thesis "
        "defines it for whole task matrices. The two are not comparable."
    )
    cells = []
    for row in sorted(rows, key=lambda row: int(row["tasks"])):
        own = scores.get(row["tasks"], {})
        shown = [percent(own.get(name)) for name in ("task arithmetic", "TSV-M without orthogonalisation", "TSV-M")]
        cells.append([str(row["tasks"]), amount(row["full"]), amount(row["truncated"]), rounding(row["after"]), *shown])
    columns = ["tasks", "full STI", "truncated STI", "truncated STI after TSV-M"]
    columns += ["task arithmetic, %", "low rank alone, %", "TSV-M, %"]
    yield Table(columns, cells, "Singular task interference and normalised accuracy")


def layers(matrices: list[Mapping[str, Any]], tasks: int) -> Iterator[Part]:
    """Truncated interference of every block."""
    rows = [_absolute(matrix, tasks) for matrix in matrices]
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    keys = ("sti", "sti_after", "normalised_sti", "chance", "procrustes_left", "procrustes_right")
    means = {b: {k: _mean([row[k] for row in rows if row["block"] == b]) for k in keys} for b in blocks}
    after = max(row["sti_after"] for row in rows)
    whole = [row for row in rows if row["procrustes_full"] is not None]
    less = all(max(row["procrustes_left"], row["procrustes_right"]) <= row["procrustes_full"] for row in whole)
    left = "none" if after == 0 else f"an STI of at most {rounding(after)} in a matrix"
    yield Text(
        f"Interference of the truncated singular vectors of {tasks} experts, averaged over the matrices of each block. "
        f"TSV-M leaves {left}. Procrustes errors ‖U − U⊥‖ show how far the vectors "
        f"move to become orthogonal{': less if truncated first, as the thesis proves' if whole and less else ''}."
    )
    cells = [
        [
            block,
            amount(mean["sti"]),
            rounding(mean["sti_after"]),
            f"{mean['normalised_sti']:.3f}",
            f"{mean['chance']:.3f}",
            f"{mean['procrustes_left']:.1f}",
            f"{mean['procrustes_right']:.1f}",
        ]
        for block, mean in means.items()
    ]
    columns = ["block", "STI", "after TSV-M", "normalised STI", "by chance", "Procrustes, left", "Procrustes, right"]
    yield Table(columns, cells, "Truncated interference by block")


def _absolute(matrix: Mapping[str, Any], tasks: int) -> dict[str, Any]:
    """The matrix with ‖U − U⊥‖ for the stored ‖U − U⊥‖/‖U‖; U has one unit column a direction and task."""
    columns = {"left": matrix["rank"], "right": matrix["rank"], "full": min(matrix["shape"])}
    keys = {f"procrustes_{side}": (tasks * count) ** 0.5 for side, count in columns.items()}
    return {**matrix, **{key: matrix[key] * norm for key, norm in keys.items() if matrix[key] is not None}}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
