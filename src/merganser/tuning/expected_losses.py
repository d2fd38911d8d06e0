"""Estimate what a merge loses, from how often it answers otherwise than the experts.

On task i, a merge θ loses L_i(θ) − L_i(θ_i). No labels are needed to see most of it: the expert's own answers stand in
for them. The share of its accuracy that a merge loses is close to SLOPE times the share of inputs that it answers
otherwise than the experts, for any method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from merganser.plain import Result

#: The share of accuracy lost per share of inputs with another answer, and the spread of losses around that line: least
#: squares over 28 pairs of text experts and 21 of an MLP, merged in four ways (`benchmarks.mergeability`).
SLOPE, SPREAD = 0.82, 0.041


@dataclass(frozen=True)
class ExpectedLoss(Result):
    """What a merge is expected to lose.

    Attributes:
        disagreement: By task, the share of inputs that the merge answers otherwise than the expert.
        value: The expected share of the experts' accuracy that is lost, mean over tasks.
        error: The standard error of the value: of the few inputs, and of the line from disagreement to loss.
    """

    disagreement: dict[str, float]
    value: float
    error: float

    def __str__(self) -> str:
        return f"{max(0.0, self.value):.1%} ± {self.error:.1%}"


def expect_loss(agreement: Mapping[str, Sequence[float]]) -> ExpectedLoss:
    """Return what a merge is expected to lose.

    Args:
        agreement: By task, for every input 1 if the merge answers as the expert does, and 0 otherwise.
    """
    sizes = {task: len(own) for task, own in agreement.items()}
    shares = {task: 1 - math.fsum(own) / len(own) for task, own in agreement.items()}
    # One more equal and one more different answer, so that few inputs without a difference are not certain.
    smoothed = {task: (share * sizes[task] + 1) / (sizes[task] + 2) for task, share in shares.items()}
    variance = math.fsum(s * (1 - s) / (sizes[task] + 2) for task, s in smoothed.items()) / len(sizes) ** 2
    value = SLOPE * math.fsum(shares.values()) / len(shares)
    return ExpectedLoss(shares, value, math.hypot(SLOPE * math.sqrt(variance), SPREAD))
