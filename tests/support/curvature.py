"""The curvature term of the gap between task arithmetic and joint training, with materialised Hessians."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from merganser.analysis.gradients import TaskLosses, mismatch


def naive_curvature_term(
    losses: TaskLosses, joint: Sequence[Tensor], alpha: float, *, hessians_at: Sequence[Tensor]
) -> Tensor:
    """Return Σ_t Σ_{e=0}^{k−2} ∇²L̄_t(hessians_at[e]) Σ_{m≤e} r_t(joint[m]); each task has one batch."""
    total = torch.zeros_like(losses.start)
    for task in losses.tasks:
        ((inputs, targets),) = losses.data[task]

        def value(theta: Tensor, inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            outputs = torch.func.functional_call(losses.module, losses.layout.unpack(theta), inputs)
            return losses.loss(outputs, targets)

        for epoch in range(len(joint) - 2):
            drift = torch.stack([mismatch(losses, theta, alpha)[task] for theta in joint[: epoch + 1]]).sum(0)
            total += torch.func.hessian(value)(hessians_at[epoch]) @ drift
    return total
