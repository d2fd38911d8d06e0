"""What the thesis prints about task vectors as gradients, where it differs from what holds.

docs/theory.md says why each statement fails; `merganser.analysis.gradients` has those that hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from merganser.analysis.gradients import (
    Bound,
    NetworkConstants,
    TaskLosses,
    curvature_term,
    expert_paths,
    joint_path,
    mismatch,
    task_arithmetic,
)

Statement: TypeAlias = Literal["general", "relu_text", "relu_appendix"]


def printed_curvature_term(losses: TaskLosses, joint: Sequence[Tensor], alpha: float) -> Tensor:
    """Return C = Σ_t Σ_{e=0}^{k−2} ∇²L̄_t(θ_MT⁽ᵉ⁾) Σ_{m≤e} r_t(θ_MT⁽ᵐ⁾): right to O(η), but no Taylor expansion."""
    total = torch.zeros_like(joint[0])
    drift = {task: torch.zeros_like(joint[0]) for task in losses.tasks}
    for theta in joint[:-2]:
        for task, residual in mismatch(losses, theta, alpha).items():
            drift[task] = drift[task] + residual
            total = total + losses.hvp(task, theta, drift[task])
    return total


def remainder(
    losses: TaskLosses, *, eta: float, alpha: float, epochs: int, factor: float, printed_term: bool = False
) -> float:
    """Return ‖θ_TA⁽ᵏ⁾ − θ_MT⁽ᵏ⁾ − factor · η²C‖: the thesis prints the factor 1, but −α is right.

    With `printed_term`, C is as printed, too.
    """
    experts = [path[-1] for path in expert_paths(losses, eta, epochs).values()]
    joint = joint_path(losses, eta, alpha, epochs)
    term = (printed_curvature_term if printed_term else curvature_term)(losses, joint, alpha)
    return float((task_arithmetic(losses.start, experts, alpha) - joint[-1] - factor * eta**2 * term).norm())


def slope(etas: Sequence[float], norms: Sequence[float]) -> float:
    """Return the slope of log norm against log η."""
    return float(np.polyfit(np.log(etas), np.log(norms), 1)[0])


def printed_bound(
    constants: NetworkConstants, *, tasks: int, alpha: float, epochs: int, statement: Statement = "general"
) -> Bound:
    """Return ‖C‖ ≤ T · C(k, 2) · |αT − 1| · H_max · G_max.

    general: H = 2γM²Π²β^{2L−2}, G = √2 MΠβ^{L−1}. relu_appendix: H·G = ½√2 M³Π³. relu_text: half of T, and
    H = ½√2 M³Π³ next to G = √2 MΠ, which counts G twice.
    """
    scale = constants.input_norm * constants.product * constants.slope ** (constants.depth - 1)
    hessian = {
        "general": 2 * constants.curvature * scale**2,
        "relu_text": math.sqrt(2) / 2 * scale**3,
        "relu_appendix": scale**2 / 2,
    }[statement]
    share = 0.5 if statement == "relu_text" else 1.0
    factor = share * tasks * math.comb(epochs, 2) * abs(alpha * tasks - 1)
    return Bound(task_factor=factor, hessian=hessian, gradient=math.sqrt(2) * scale)


def printed_threshold(decreases: Mapping[str, float], samples: Mapping[str, int]) -> float:
    """Return (1/T)(1 − min_I n / max_D n) Σ_I |ΔL̄|, above which a decrease of the PA-ATM loss is said to suffice.

    D are the tasks whose loss fell, I the others. Minimum and maximum are exchanged, and the ratio is inverted.
    """
    fell = [samples[task] for task, decrease in decreases.items() if decrease > 0]
    rose = [samples[task] for task, decrease in decreases.items() if decrease <= 0]
    if not fell or not rose:
        return 0.0 if fell else math.inf
    increase = -sum(decrease for decrease in decreases.values() if decrease <= 0)
    return (1 - min(rose) / max(fell)) * increase / len(decreases)
