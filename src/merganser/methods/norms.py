"""Task vectors with a common norm, an option of every task-vector method (`norms: equal`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from merganser.kernels.spheres import total
from merganser.methods.base import Blocks, Group, Method
from merganser.methods.parameters import param


@dataclass(frozen=True)
class TaskVectorMethod(Method):
    """A rule for task vectors whose norms may be made equal first.

    The longest task vector dominates a sum, and the leading directions of spectral rules. Yoshida et al. 2026,
    DisTaC (arXiv:2508.01148), scale task vectors to a common norm and then distil; here they are only scaled.
    """

    base = "required"
    norms: Literal["keep", "equal"] = param(
        "keep",
        "`equal` scales each task vector to the geometric mean of their norms over the model",
        choices=("keep", "equal"),
    )

    @property
    def equalizes(self) -> bool:
        return self.norms == "equal"


def common_gains(tensors: Iterable[Blocks]) -> dict[str, float]:
    """Return factors by label that give all task vectors the geometric mean of their norms.

    Norms are over all these tensors together. A model equal to the base keeps the factor 1.
    """
    squares: dict[str, list[float]] = {}
    for blocks in tensors:
        if len(blocks) and math.prod(blocks.shape):
            for label, column in zip(blocks.labels, zip(*blocks.map(_squares), strict=True), strict=True):
                squares.setdefault(label, []).extend(column)
    norms = {label: math.sqrt(math.fsum(parts)) for label, parts in squares.items()}
    positive = [math.log(norm) for norm in norms.values() if norm > 0]
    common = math.exp(math.fsum(positive) / len(positive)) if positive else 0.0
    return {label: common / norm if norm > 0 else 1.0 for label, norm in norms.items()}


def _squares(group: Group) -> list[float]:
    return [total(delta.mul_(delta)) for delta in group.deltas()]
