"""Singular task interference of text experts, every matrix by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import merganser as mg


def layers(base: Mapping[str, Tensor], experts: Mapping[str, Mapping[str, Tensor]]) -> list[dict[str, Any]]:
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
