"""Logistic regression with a normal prior by Newton's method, the solver for abilities and mixtures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, ndtri

from merganser.evolve.arrays import Array

# The likelihood alone has no maximum if a hyperplane separates right from wrong answers, which is common for small
# subsets. This small ridge makes the maximum exist without moving an existing one.
RIDGE = 1e-6
#: Maximum number of Newton's steps.
STEPS = 100


@dataclass(frozen=True)
class Posterior:
    """Mode and covariance (inverse curvature at the mode: Laplace's approximation)."""

    mean: Array
    covariance: Array

    def interval(self, level: float = 0.95) -> tuple[Array, Array]:
        """Return the ends of the interval of each coordinate at the confidence `level`."""
        reach = ndtri(0.5 + level / 2) * np.sqrt(np.diag(self.covariance))
        return self.mean - reach, self.mean + reach


def regress(
    design: ArrayLike,
    offset: ArrayLike,
    answers: ArrayLike,
    mean: ArrayLike = 0.0,
    precision: ArrayLike = 0.0,
) -> Posterior:
    """Return the x that maximises Σ_i log p(y_i | σ(design_i · x + offset_i)) − ½ Σ_k precision_k (x_k − mean_k)².

    Concave in x. Newton's method with step halving: gradient Xᵀ(y − p) − Λ(x − μ), curvature Xᵀ diag(p(1 − p)) X + Λ.
    Answers may be fractions in [0, 1].
    """
    rows = np.asarray(design, dtype=np.float64)
    shift = np.broadcast_to(np.asarray(offset, dtype=np.float64), len(rows))
    targets = np.asarray(answers, dtype=np.float64)
    count = rows.shape[1]
    centre = np.broadcast_to(np.asarray(mean, dtype=np.float64), count)
    penalty = np.maximum(np.broadcast_to(np.asarray(precision, dtype=np.float64), count), RIDGE)

    def loss(x: Array) -> float:
        logits = rows @ x + shift
        misfit = np.logaddexp(0.0, logits) - targets * logits
        return float(misfit.sum() + 0.5 * penalty @ (x - centre) ** 2)

    x = centre.copy()
    value = loss(x)
    curvature = np.diag(penalty)
    for _ in range(STEPS):
        p = expit(rows @ x + shift)
        gradient = rows.T @ (p - targets) + penalty * (x - centre)
        curvature = (rows * (p * (1 - p))[:, None]).T @ rows + np.diag(penalty)
        direction = np.linalg.solve(curvature, gradient)
        decrease = float(gradient @ direction)
        if decrease < 1e-12:
            break
        length = 1.0
        while (moved := loss(x - length * direction)) > value - 1e-4 * length * decrease and length > 1e-8:
            length /= 2
        if moved >= value:
            break
        x, value = x - length * direction, moved
    return Posterior(x, np.linalg.inv(curvature))
