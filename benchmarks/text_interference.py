"""Singular task interference of text experts, every matrix by itself and all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

import merganser as mg
from merganser.interference.sti import Overlap
from merganser.interference.task_matrices import open_task_matrices

Experts = Mapping[str, Mapping[str, Tensor]]


def layers(base: Mapping[str, Tensor], experts: Experts) -> list[dict[str, Any]]:
    """The survey of `mg.interference.survey`, a flat row for each matrix."""
    found = mg.interference.survey(dict(base), {name: dict(expert) for name, expert in experts.items()})
    return [
        {
            "layer": matrix.name,
            "block": matrix.block,
            "shape": list(matrix.shape),
            "rank": matrix.rank,
            "sti": matrix.sti,
            "sti_after": matrix.sti_after,
            "normalised_sti": matrix.normalized,
            "chance": matrix.chance,
            "procrustes_left": matrix.procrustes[0],
            "procrustes_right": matrix.procrustes[1],
            "procrustes_full": next((error for error in matrix.procrustes_full if error is not None), None),
            "energy": sum(matrix.energy) / len(matrix.energy),
        }
        for matrix in found.matrices
    ]


def totals(base: Mapping[str, Tensor], experts: Experts, matrices: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """STI summed over matrices: of the factors truncated to rank n/T, of all components, and after TSV-Merge."""
    opened = open_task_matrices(dict(base), {name: dict(expert) for name, expert in experts.items()})
    full = 0.0
    for matrix in matrices:
        full += Overlap.of(opened.factors(matrix["layer"], min(matrix["shape"]))).interference()
    return {
        "truncated": sum(matrix["sti"] for matrix in matrices),
        "full": full,
        "after": sum(matrix["sti_after"] for matrix in matrices),
    }
