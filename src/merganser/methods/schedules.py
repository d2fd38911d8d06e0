"""WSM: average checkpoints of one run as if its learning rate had decayed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

from merganser.methods.averages import weighted_mean
from merganser.methods.base import Group, Method, Reduction
from merganser.methods.parameters import param
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

Schedule = Literal["linear", "sqrt", "cosine"]


def decay(schedule: Schedule, steps: int) -> list[float]:
    """Return the learning rate of each of `steps` steps, from just below 1 down to above 0.

    With x = i / (k + 1) for the steps i = 1 … k: `linear` 1 − x, `sqrt` 1 − √x, `cosine` (1 + cos πx) / 2.

    Example:
        >>> decay("linear", 3)
        [0.75, 0.5, 0.25]
    """
    places = [step / (steps + 1) for step in range(1, steps + 1)]
    if schedule == "linear":
        return [1 - x for x in places]
    if schedule == "sqrt":
        return [1 - math.sqrt(x) for x in places]
    return [(1 + math.cos(math.pi * x)) / 2 for x in places]


@register
@dataclass(frozen=True)
class WarmupStableMerge(Method):
    """θ = θ_0 + Σ_i w_i (θ_i − θ_{i−1}) = Σ_i c_i θ_i over checkpoints θ_0 … θ_k of one run, oldest first.

    A run with a constant learning rate moves by θ_i − θ_{i−1} between two checkpoints. Scaling these steps by the
    weights w_i of a decaying learning rate approximates, to first order, a decay phase over the same steps, which need
    not be trained. c_0 = 1 − w_1, c_i = w_i − w_{i+1} and c_k = w_k are nonnegative and sum to one. `last` uses only
    the latest checkpoints. Tian et al. 2025, WSM: Decay-free learning rate schedule via checkpoint merging
    (arXiv:2507.17634).
    """

    name = "wsm"
    summary = "average of checkpoints of one run (oldest first) that replaces learning-rate decay"

    schedule: Literal["linear", "sqrt", "cosine"] = param(
        "sqrt", "shape of the decay that the average replaces", choices=get_args(Schedule)
    )
    last: int = param(0, "number of the latest checkpoints to average; 0 for all", low=0)

    def shares(self, models: int) -> list[float]:
        """Return c, the share of each checkpoint."""
        used = min(self.last, models) if self.last else models
        rates = [1.0, *decay(self.schedule, used - 1), 0.0]
        return [0.0] * (models - used) + [before - after for before, after in pairwise(rates)]

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        return weighted_mean(group.models, self.shares(len(group.models)), group.finite)
