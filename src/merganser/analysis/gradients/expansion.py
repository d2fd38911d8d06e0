"""Task arithmetic and joint training: equal after one epoch of gradient descent, then different by −αη²C + O(η³)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from merganser.analysis.gradients.losses import TaskLosses
from merganser.errors import InputError
from merganser.plain import Result


def descend(gradient: Callable[[Tensor], Tensor], start: Tensor, step: float, epochs: int) -> list[Tensor]:
    """Return θ⁽⁰⁾ … θ⁽ᵏ⁾ of full-batch gradient descent θ ← θ − step · ∇L(θ).

    Args:
        gradient: Returns the gradient at a point.
        start: The first point.
        step: The step size.
        epochs: The number of steps.
    """
    path = [start]
    for _ in range(epochs):
        path.append(path[-1] - step * gradient(path[-1]))
    return path


def expert_paths(losses: TaskLosses, eta: float, epochs: int) -> dict[str, list[Tensor]]:
    """Return each task's descent on its own loss with step η.

    Args:
        losses: The losses of the tasks, and the weights that all runs start from.
        eta: η.
        epochs: The number of steps.
    """
    return {
        task: descend(lambda theta, task=task: losses.gradient(task, theta), losses.start, eta, epochs)  # type: ignore[misc]
        for task in losses.tasks
    }


def joint_path(losses: TaskLosses, eta: float, alpha: float, epochs: int) -> list[Tensor]:
    """Return the descent on Σ_t L̄_t with the matched step αη.

    Args:
        losses: The losses of the tasks, and the weights that all runs start from.
        eta: η.
        alpha: α.
        epochs: The number of steps.
    """
    return descend(losses.joint_gradient, losses.start, alpha * eta, epochs)


def task_arithmetic(base: Tensor, experts: Sequence[Tensor], alpha: float) -> Tensor:
    """Return θ_TA = θ0 + α Σ_t (θ_t − θ0).

    Args:
        base: θ0, as a flat vector.
        experts: The weights θ_t, as flat vectors.
        alpha: α.
    """
    return base + alpha * torch.stack([expert - base for expert in experts]).sum(0)


def mismatch(losses: TaskLosses, theta: Tensor, alpha: float) -> dict[str, Tensor]:
    """Return r_t(θ) = α Σ_t' ∇L̄_t'(θ) − ∇L̄_t(θ) for every task: a joint step minus a step on t alone.

    Args:
        losses: The losses of the tasks.
        theta: Weights, as a flat vector.
        alpha: α.
    """
    gradients = {task: losses.gradient(task, theta) for task in losses.tasks}
    joint = alpha * torch.stack(list(gradients.values())).sum(0)
    return {task: joint - gradient for task, gradient in gradients.items()}


def curvature_term(losses: TaskLosses, joint: Sequence[Tensor], alpha: float) -> Tensor:
    """Return C = Σ_t Σ_{e=0}^{k−2} ∇²L̄_t(θ_MT⁽ᵉ⁺¹⁾) Σ_{m≤e} r_t(θ_MT⁽ᵐ⁾) along a joint path of k epochs.

    Zero for k = 1. Needs one Hessian-vector product per task and epoch after the first.

    Args:
        losses: The losses of the tasks.
        joint: The joint path θ_MT⁽⁰⁾ … θ_MT⁽ᵏ⁾.
        alpha: α.
    """
    total = torch.zeros_like(joint[0])
    drift = {task: torch.zeros_like(joint[0]) for task in losses.tasks}
    for before, after in itertools.pairwise(joint[:-1]):
        for task, residual in mismatch(losses, before, alpha).items():
            drift[task] = drift[task] + residual
            total = total + losses.hvp(task, after, drift[task])
    return total


@dataclass(frozen=True)
class Gap(Result):
    """θ_TA⁽ᵏ⁾ − θ_MT⁽ᵏ⁾ at one step size, and what the second-order term leaves of it (Euclidean norms)."""

    eta: float
    alpha: float
    epochs: int
    tasks: int
    gap: float
    travelled: float
    """‖θ_MT⁽ᵏ⁾ − θ0‖, the scale for judging the gap."""
    curvature: float
    """‖C‖."""
    residual: float
    """‖gap + αη²C‖."""

    @property
    def relative(self) -> float:
        """Return the gap over the distance travelled."""
        return self.gap / self.travelled if self.travelled else 0.0


def gap(losses: TaskLosses, *, eta: float, alpha: float, epochs: int) -> Gap:
    """Run the experts and the joint model, and compare their gap with the second-order term.

    Args:
        losses: The losses of the tasks, and the weights that all runs start from.
        eta: η, the step size of the experts.
        alpha: α, the scale of the task vectors.
        epochs: k, the number of steps.
    """
    if epochs < 1:
        raise InputError(f"epochs must be at least 1, got {epochs}")
    experts = [path[-1] for path in expert_paths(losses, eta, epochs).values()]
    joint = joint_path(losses, eta, alpha, epochs)
    difference = task_arithmetic(losses.start, experts, alpha) - joint[-1]
    curvature = curvature_term(losses, joint, alpha)
    return Gap(
        eta=eta,
        alpha=alpha,
        epochs=epochs,
        tasks=len(losses.tasks),
        gap=_norm(difference),
        travelled=_norm(joint[-1] - losses.start),
        curvature=_norm(curvature),
        residual=_norm(difference + alpha * eta**2 * curvature),
    )


@dataclass(frozen=True)
class Order(Result):
    """Observed orders in η: slopes of log ‖·‖ against log η over `gaps`.

    Theory for k > 1: 2 for the gap, 3 for `residual`.
    """

    gaps: tuple[Gap, ...]
    gap_slope: float
    residual_slope: float


def observed_order(losses: TaskLosses, etas: Sequence[float], *, alpha: float, epochs: int) -> Order:
    """Measure the orders at the given step sizes (at least two, all positive), for more than one epoch.

    Args:
        losses: The losses of the tasks, and the weights that all runs start from.
        etas: The step sizes.
        alpha: α, the scale of the task vectors.
        epochs: k, the number of steps.
    """
    if len(set(etas)) < 2 or min(etas) <= 0:
        raise InputError(f"an order needs two or more different positive step sizes, got {list(etas)}")
    if epochs < 2:
        raise InputError("after one epoch the gap is only rounding; an order needs epochs >= 2")
    gaps = tuple(gap(losses, eta=eta, alpha=alpha, epochs=epochs) for eta in etas)
    return Order(
        gaps=gaps,
        gap_slope=_slope(etas, [g.gap for g in gaps]),
        residual_slope=_slope(etas, [g.residual for g in gaps]),
    )


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def _slope(etas: Sequence[float], norms: Sequence[float]) -> float:
    """Return the least-squares slope on log-log axes; NaN if a norm is zero."""
    if min(norms) <= 0:
        return float("nan")
    return float(np.polyfit(np.log(etas), np.log(norms), 1)[0])
