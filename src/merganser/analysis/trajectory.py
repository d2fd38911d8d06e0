"""Measure from checkpoints how far fine-tuning runs have left the regime in which a task vector is a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from merganser.analysis.inner_products import STATISTICS, finite_products
from merganser.checkpoints.opening import Reference
from merganser.engine.geometry import cosines
from merganser.errors import InputError
from merganser.plain import Result

Regime = Literal["linear", "bent", "left"]


@dataclass(frozen=True)
class Trajectory(Result):
    """One run relative to its base; entry k − 1 of each tuple is for epoch k.

    - `shares`: ‖θ⁽ᵏ⁾ − θ⁽ᵏ⁻¹⁾‖ / η_k over their sum: the thesis' normalised gradient norm when the run is full-batch
      gradient descent, its surrogate otherwise.
    - `cosines`: cos(τ_1, τ_k).
    - `straightness`: ‖τ_k‖ / Σ_{j≤k} ‖step_j‖, 1 on a straight line.
    - `departure`: the part of τ_k orthogonal to τ_1, √(1 − cos²).
    """

    shares: tuple[float, ...]
    cosines: tuple[float, ...]
    straightness: tuple[float, ...]
    departure: tuple[float, ...]
    norms: tuple[float, ...]


def trajectory(
    checkpoints: Sequence[Reference],
    *,
    learning_rates: Sequence[float] | None = None,
    exclude: Sequence[str] = STATISTICS,
) -> Trajectory:
    """Diagnose a run from [base, epoch 1, …, epoch K].

    Args:
        checkpoints: The base, then the checkpoint of each epoch.
        learning_rates: The learning rate of each epoch, which turn displacements into gradients.
        exclude: Globs of tensors to leave out.
    """
    if len(checkpoints) < 2:
        raise InputError("a trajectory needs the base and at least one epoch's checkpoint")
    epochs = len(checkpoints) - 1
    if learning_rates is not None and (len(learning_rates) != epochs or min(learning_rates) <= 0):
        raise InputError(f"{epochs} positive learning rates expected, one per epoch, got {list(learning_rates)}")
    gram = finite_products(checkpoints[1:], base=checkpoints[0], exclude=exclude)
    norms = np.sqrt(np.diag(gram))
    if norms[0] == 0:
        raise InputError("epoch 1 equals the base, so there is no τ_1 to compare the others with; leave it out")
    padded = np.zeros((epochs + 1, epochs + 1))
    padded[1:, 1:] = gram
    squares = np.diag(padded)
    steps = np.sqrt(np.maximum(squares[1:] + squares[:-1] - 2 * np.diag(padded, 1), 0.0))
    gradients = steps if learning_rates is None else steps / np.asarray(learning_rates)
    cosine = cosines(gram)[0]
    return Trajectory(
        shares=_floats(gradients / gradients.sum()),
        cosines=_floats(cosine),
        straightness=_floats(norms / np.cumsum(steps)),
        departure=_floats(np.sqrt(1 - cosine**2)),
        norms=_floats(norms),
    )


@dataclass(frozen=True)
class LinearRegime(Result):
    """Verdict on a set of experts: `linear`, `bent` or `left`, by the smallest cos(τ_1, τ_K) among them.

    The thesis found cosines above 0.8 at the second epoch and above 0.6 up to the tenth in runs that merge well: a set
    is `linear` from `linear_from` on, `bent` from `bent_from` on, `left` below.
    """

    verdict: Regime
    worst: str
    final_cosines: dict[str, float]
    linear_through: dict[str, int]
    """Last epoch up to which cos(τ_1, τ_k) stays at or above `linear_from`."""
    linear_from: float
    bent_from: float
    runs: dict[str, Trajectory]


def linear_regime(
    runs: Mapping[str, Sequence[Reference]],
    *,
    linear_from: float = 0.8,
    bent_from: float = 0.6,
    exclude: Sequence[str] = STATISTICS,
) -> LinearRegime:
    """Judge experts from their runs [base, epoch 1, …, epoch K]; the first epoch represents the gradient.

    Args:
        runs: By expert, the base and the checkpoint of each epoch.
        linear_from: The cosine from which a run is linear.
        bent_from: The cosine from which it is bent.
        exclude: Globs of tensors to leave out.
    """
    if not runs:
        raise InputError("expected at least one run")
    judged = {name: trajectory(run, exclude=exclude) for name, run in runs.items()}
    if short := [name for name, run in judged.items() if len(run.cosines) < 2]:
        raise InputError(f"run {short[0]!r} has one epoch: cos(τ_1, τ_1) is 1 and says nothing; give two or more")
    final = {name: run.cosines[-1] for name, run in judged.items()}
    worst = min(final, key=lambda name: final[name])
    verdict: Regime = "left"
    if final[worst] >= bent_from:
        verdict = "linear" if final[worst] >= linear_from else "bent"
    return LinearRegime(
        verdict=verdict,
        worst=worst,
        final_cosines=final,
        linear_through={name: _prefix(run.cosines, linear_from) for name, run in judged.items()},
        linear_from=linear_from,
        bent_from=bent_from,
        runs=judged,
    )


@dataclass(frozen=True)
class Projection(Result):
    """Checkpoints on their first two principal axes: `points[strategy]` in the order given, and variance explained."""

    points: dict[str, tuple[tuple[float, float], ...]]
    explained: tuple[float, float]


def project(strategies: Mapping[str, Sequence[Reference]], *, exclude: Sequence[str] = STATISTICS) -> Projection:
    """Project the checkpoints of several strategies (ATM, TIES, joint training …) onto one plane by PCA.

    Uses the eigenvectors of the centred inner products, so that checkpoints of any size are never flattened. Each axis
    has the sign that makes its largest coordinate positive.

    Args:
        strategies: Checkpoints by strategy.
        exclude: Globs of tensors to leave out.
    """
    flat = [reference for run in strategies.values() for reference in run]
    if len(flat) < 2:
        raise InputError("a projection needs two or more checkpoints")
    gram = finite_products(flat, base=flat[0], exclude=exclude)
    centred = gram - gram.mean(0, keepdims=True) - gram.mean(1, keepdims=True) + gram.mean()
    values, vectors = np.linalg.eigh(centred)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    axes = vectors[:, :2] * np.sqrt(values[:2])
    axes = axes * np.where(axes[np.abs(axes).argmax(0), [0, 1]] < 0, -1.0, 1.0)
    ends = np.cumsum([len(run) for run in strategies.values()])
    total = values.sum() or 1.0
    return Projection(
        points={
            name: tuple((float(x), float(y)) for x, y in axes[end - len(run) : end])
            for (name, run), end in zip(strategies.items(), ends, strict=True)
        },
        explained=(float(values[0] / total), float(values[1] / total)),
    )


def _prefix(cosines: Sequence[float], threshold: float) -> int:
    below = [epoch for epoch, cosine in enumerate(cosines) if cosine < threshold]
    return below[0] if below else len(cosines)


def _floats(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
