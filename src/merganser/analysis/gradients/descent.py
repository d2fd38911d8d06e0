"""Check whether a step that lowers the PA-ATM loss (mean over tasks) also lowers the target loss (mean over
samples).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from merganser.errors import InputError
from merganser.plain import Result


@dataclass(frozen=True)
class DescentCheck(Result):
    """Decreases ΔL = L(before) − L(after) of both losses, and the two sufficient conditions for the target to fall.

    D are the tasks whose loss fell, I the others. A condition is `atm_decrease > threshold`:

    - `threshold`: (1/T)(max_I n / min_D n − 1) Σ_I |ΔL̄|. Sufficient (docs/theory.md). Infinite if D is empty.
    - `printed_threshold`: (1/T)(1 − min_I n / max_D n) Σ_I |ΔL̄|, as printed in the thesis. Not sufficient: minimum and
      maximum are exchanged.
    """

    atm_decrease: float
    target_decrease: float
    threshold: float
    printed_threshold: float

    @property
    def guaranteed(self) -> bool:
        """Return whether the corrected condition holds, so that the target loss has fallen."""
        return self.atm_decrease > self.threshold

    @property
    def printed_guarantee(self) -> bool:
        """Return whether the printed condition holds, which guarantees nothing."""
        return self.atm_decrease > self.printed_threshold


def descent_check(decreases: Mapping[str, float], samples: Mapping[str, int]) -> DescentCheck:
    """Judge one step from each task's decrease of mean loss and its number of samples.

    Args:
        decreases: By task, the decrease of its mean loss.
        samples: By task, its number of samples.
    """
    if not decreases or set(decreases) != set(samples):
        raise InputError(
            f"decreases are for tasks {sorted(decreases)}, but sample counts for {sorted(samples)}; name the same tasks"
        )
    if min(samples.values()) <= 0:
        raise InputError("every task needs a positive number of samples")
    tasks = len(decreases)
    fell = [samples[t] for t, d in decreases.items() if d > 0]
    rose = [samples[t] for t, d in decreases.items() if d <= 0]
    increase = sum(-d for d in decreases.values() if d <= 0)
    if not fell:
        threshold = printed = float("inf")
    elif not rose:
        threshold = printed = 0.0
    else:
        threshold = (max(rose) / min(fell) - 1) * increase / tasks
        printed = (1 - min(rose) / max(fell)) * increase / tasks
    return DescentCheck(
        atm_decrease=sum(decreases.values()) / tasks,
        target_decrease=sum(samples[t] * d for t, d in decreases.items()) / sum(samples.values()),
        threshold=threshold,
        printed_threshold=printed,
    )
