"""Fit abilities and items to a matrix of answers, in seconds.

The priors are the thesis': γ_md ~ N(μγ_d, 1/uγ_d), a_id ~ N(μa_d, 1/ua_d), β_i ~ N(μβ, 1/uβ), every μ ~ N(0, 10), every
u ~ Γ(1, 1), with point estimates the means of a variational posterior. Its factors q(γ_m) and q(a_i, β_i) are normal,
the μ and u are set to their modes, and the logistic likelihood is bounded by Jaakkola and Jordan's quadratic

    log p(y | z) ≥ log σ(ξ) + (y − ½)z − ξ/2 − λ(ξ)(z² − ξ²),    λ(ξ) = tanh(ξ/2) / 4ξ,    ξ² = E[z²],

which makes every update a batch of small linear solves that can only raise the bound: no step size, no sampling.

The joint mode over all parameters is not a substitute: the scales of γ and a are exchangeable, so with more items than
models it diverges to a → μa, γ → ∞, and ua and uβ collapse to their largest values. Averaging over q prevents both, and
a separate precision per dimension switches off dimensions that the answers do not support.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from merganser.errors import InputError
from merganser.evolve.arrays import Array
from merganser.evolve.irt.model import IRT, MAX_DIMENSIONS, Items, Normal

CANDIDATES = (1, 2, 3, 5, 8, 11, 15)
MEAN_VARIANCE = 10.0


@dataclass(frozen=True)
class _Prior:
    mean: Tensor
    precision: Tensor


@dataclass(frozen=True)
class _Factor:
    """Independent normals, one per row, with the bound's second moments E[xxᵀ] flattened."""

    mean: Tensor
    covariance: Tensor

    @property
    def moments(self) -> Tensor:
        outer = self.mean[:, :, None] * self.mean[:, None, :]
        return (outer + self.covariance).flatten(1)

    def divergence(self, prior: _Prior) -> float:
        """Return KL(q ‖ prior), summed over rows."""
        count = self.mean.shape[1]
        spread = self.covariance.diagonal(dim1=1, dim2=2) + (self.mean - prior.mean) ** 2
        volume = torch.linalg.slogdet(self.covariance)[1] + prior.precision.log().sum()
        return 0.5 * float((spread * prior.precision).sum() - count * len(self.mean) - volume.sum())


@dataclass(frozen=True)
class _Solution:
    """q(γ), q(a, β), their priors, and the bound after each sweep."""

    abilities: _Factor
    items: _Factor
    of_abilities: _Prior
    of_items: _Prior
    bounds: list[float]


def fit(
    answers: ArrayLike | Tensor,
    mask: ArrayLike | Tensor | None = None,
    dimensions: int | None = None,
    *,
    seed: int = 0,
    sweeps: int = 200,
    tolerance: float = 1e-5,
    device: str = "cpu",
) -> IRT:
    """Fit an IRT to answers.

    Args:
        answers: Scores in [0, 1], shape (models, items); NaN is missing.
        mask: 0 where an answer is missing.
        dimensions: At most 15. By default the fewest whose log-loss on a held-out tenth of the answers comes within one
            standard error of the best.
        seed: The seed of the held-out tenth; nothing else is random.
        sweeps: The maximum number of iterations.
        tolerance: Stop when parameters move less than this.
        device: The torch device.

    Returns:
        The fitted model.

    Raises:
        InputError: If the answers have an invalid shape or range.

    Example:
        >>> import numpy as np
        >>> irt = mg.evolve.irt.fit(np.random.default_rng(0).integers(0, 2, (12, 30)), dimensions=1)
    """
    observed, known = checked(answers, mask, dimensions, device)
    losses: dict[int, float] = {}
    if dimensions is None:
        dimensions, losses = _choose(observed, known, seed, sweeps, tolerance)
    return _orient(sweep(observed, known, dimensions, sweeps, tolerance), known, losses)


def log_loss(irt: IRT, answers: ArrayLike, mask: ArrayLike | None = None) -> float:
    """Return the mean of −log p(answer) over the entries that are neither NaN nor 0 in `mask`."""
    targets, known = checked(answers, mask, None, "cpu")
    logits = torch.from_numpy(irt.abilities @ irt.items.discrimination.T - irt.items.difficulty)
    return float((known * (softplus(logits) - targets * logits)).sum() / known.sum())


def checked(
    answers: ArrayLike | Tensor, mask: ArrayLike | Tensor | None, dimensions: int | None, device: str
) -> tuple[Tensor, Tensor]:
    try:
        matrix = torch.as_tensor(np.asarray(answers, dtype=np.float64), device=device)
    except (TypeError, ValueError):
        raise InputError("answers are a models × items matrix of numbers, every row as long as the others") from None
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise InputError(f"answers are a models × items matrix, not an array of shape {tuple(matrix.shape)}")
    known = ~matrix.isnan()
    if mask is not None:
        given = torch.as_tensor(np.asarray(mask), device=device)
        if given.shape != matrix.shape:
            raise InputError(f"the mask has shape {tuple(given.shape)}, the answers {tuple(matrix.shape)}")
        known &= given.to(torch.bool)
    matrix = matrix.where(known, 0.5)
    if not known.any():
        raise InputError("every answer is missing")
    if matrix.min() < 0 or matrix.max() > 1:
        raise InputError(f"answers lie in [0, 1]; found {matrix.min():g} to {matrix.max():g}")
    if dimensions is not None and not 1 <= dimensions <= MAX_DIMENSIONS:
        raise InputError(f"dimensions must be between 1 and {MAX_DIMENSIONS}, not {dimensions}")
    return matrix, known.to(torch.float64)


def _choose(answers: Tensor, known: Tensor, seed: int, sweeps: int, tolerance: float) -> tuple[int, dict[int, float]]:
    draw = torch.rand(answers.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    held = known * (draw < 0.1).to(known)
    if held.sum() < 2 or len(answers) < 2:
        return 1, {}
    losses: dict[int, Tensor] = {}
    for count in (c for c in CANDIDATES if c < max(3, len(answers))):
        solution = sweep(answers, known - held, count, sweeps, tolerance)
        logits = _extend(solution.abilities.mean) @ solution.items.mean.T
        losses[count] = (softplus(logits) - answers * logits)[held > 0]
        tried = list(losses)
        if len(tried) > 2 and min(losses[c].mean() for c in tried[-2:]) > losses[tried[-3]].mean():
            break
    best = min(losses, key=lambda c: losses[c].mean())

    def as_good(count: int) -> bool:
        excess = losses[count] - losses[best]
        return bool(excess.mean() <= excess.std() / len(excess) ** 0.5)

    chosen = next(c for c in losses if c == best or as_good(c))
    return chosen, {c: float(loss.mean()) for c, loss in losses.items()}


def _extend(abilities: Tensor) -> Tensor:
    """Return [γ ‖ −1], so that z = [γ ‖ −1] · [a ‖ β]."""
    return torch.cat([abilities, -torch.ones_like(abilities[:, :1])], 1)


def sweep(answers: Tensor, known: Tensor, dimensions: int, sweeps: int, tolerance: float) -> _Solution:
    """Run coordinate ascent on the bound until a sweep gains less than `tolerance` per answer."""
    signs = (answers - 0.5) * known
    abilities, items = _start(answers, known, dimensions)
    zeros = torch.zeros(dimensions + 1, dtype=answers.dtype, device=answers.device)
    of_items, of_abilities = _Prior(zeros, zeros + 1), _Prior(zeros[1:], zeros[1:] + 1)
    bounds: list[float] = []
    for _ in range(sweeps):
        seen = _Factor(_extend(abilities.mean), _pad(abilities.covariance))
        moments = seen.moments
        items = _solve(2 * _slopes(moments, items.moments, known).T @ moments, signs.T @ seen.mean, of_items)
        moments = items.moments
        curvature = (2 * _slopes(seen.moments, moments, known) @ moments).reshape(len(answers), dimensions + 1, -1)
        abilities = _solve(
            curvature[:, :-1, :-1].flatten(1),
            signs @ items.mean[:, :-1] + curvature[:, :-1, -1],
            of_abilities,
        )
        of_items, of_abilities = _update_modes(items, of_items), _update_modes(abilities, of_abilities)
        bounds.append(_bound(signs, known, abilities, items, of_abilities, of_items))
        if len(bounds) > 1 and bounds[-1] - bounds[-2] < tolerance * float(known.sum()):
            break
    return _Solution(abilities, items, of_abilities, of_items, bounds)


def _start(answers: Tensor, known: Tensor, dimensions: int) -> tuple[_Factor, _Factor]:
    """Return principal components of the residuals after item means: deterministic, and close to the solution."""
    easiness = ((answers * known).sum(0) + 0.5) / (known.sum(0) + 1)
    residual = (answers - easiness) * known
    left = torch.linalg.svd(residual, full_matrices=False)[0]
    width = min(dimensions, left.shape[1])
    gamma = answers.new_zeros(len(answers), dimensions)
    gamma[:, :width] = left[:, :width] * len(answers) ** 0.5
    items = torch.cat([answers.new_zeros(answers.shape[1], dimensions), -easiness.logit()[:, None]], 1)
    spread = torch.eye(dimensions + 1, dtype=answers.dtype, device=answers.device).expand(len(items), -1, -1)
    nothing = answers.new_zeros(len(answers), dimensions, dimensions)
    return _Factor(gamma, nothing), _Factor(items, 0.1 * spread)


def _pad(covariance: Tensor) -> Tensor:
    return torch.nn.functional.pad(covariance, (0, 1, 0, 1))


def _slopes(left: Tensor, right: Tensor, known: Tensor) -> Tensor:
    """Return λ(ξ) at ξ² = E[z²] = ⟨E[xxᵀ], E[yyᵀ]⟩, 0 where the answer is missing."""
    xi = (left @ right.T).clamp_min(1e-12).sqrt()
    return known * torch.tanh(xi / 2) / (4 * xi)


def _solve(curvature: Tensor, pull: Tensor, prior: _Prior) -> _Factor:
    count = len(prior.mean)
    covariance = torch.linalg.inv(curvature.reshape(-1, count, count) + torch.diag(prior.precision))
    mean = covariance @ (pull + prior.precision * prior.mean)[:, :, None]
    return _Factor(mean[:, :, 0], covariance)


def _update_modes(factor: _Factor, prior: _Prior) -> _Prior:
    """Return the modes of μ given u and then of u given μ, per column."""
    rows = len(factor.mean)
    mean = prior.precision * factor.mean.sum(0) / (rows * prior.precision + 1 / MEAN_VARIANCE)
    spread = (factor.covariance.diagonal(dim1=1, dim2=2) + (factor.mean - mean) ** 2).sum(0)
    return _Prior(mean, (rows / 2) / (1 + spread / 2))


def _bound(
    signs: Tensor, known: Tensor, abilities: _Factor, items: _Factor, of_abilities: _Prior, of_items: _Prior
) -> float:
    seen = _Factor(_extend(abilities.mean), _pad(abilities.covariance))
    xi = (seen.moments @ items.moments.T).clamp_min(0).sqrt()
    likelihood = (known * (logsigmoid(xi) - xi / 2) + signs * (seen.mean @ items.mean.T)).sum()
    hyper = sum(
        -(prior.mean**2).sum() / (2 * MEAN_VARIANCE) - prior.precision.sum() for prior in (of_abilities, of_items)
    )
    return float(likelihood - abilities.divergence(of_abilities) - items.divergence(of_items) + hyper)


def _orient(solution: _Solution, known: Tensor, losses: dict[int, float]) -> IRT:
    """Fix the signs (able models answer better: Σ a ≥ 0) and the order (most variance first), and add Laplace
    errors.
    """
    gamma, a, beta = solution.abilities.mean, solution.items.mean[:, :-1], solution.items.mean[:, -1]
    order = ((a**2).sum(0) * gamma.var(0, correction=0)).argsort(descending=True, stable=True)
    sign = torch.where(a.sum(0) < 0, -1.0, 1.0)[order].to(a)
    a, gamma, mean = a[:, order] * sign, gamma[:, order] * sign, solution.of_abilities.mean[order] * sign
    precision = solution.of_abilities.precision[order]
    of_items = torch.cat([solution.of_items.precision[:-1][order], solution.of_items.precision[-1:]])
    p = torch.sigmoid(gamma @ a.T - beta)
    weight = known * p * (1 - p)
    covariances = _inverse_curvature(weight, a, precision)
    errors = _inverse_curvature(weight.T, _extend(gamma), of_items).diagonal(dim1=1, dim2=2).sqrt()
    return IRT(
        _numpy(gamma),
        Items(_numpy(a), _numpy(beta), _numpy(errors)),
        Normal(_numpy(mean), _numpy(precision)),
        _numpy(covariances),
        losses,
    )


def _numpy(tensor: Tensor) -> Array:
    array: Array = tensor.cpu().contiguous().numpy()
    return array


def _inverse_curvature(weight: Tensor, design: Tensor, precision: Tensor) -> Tensor:
    """Return (Σ_i w_mi x_i x_iᵀ + diag(u))⁻¹ for every row m of `weight`."""
    count = design.shape[1]
    outer = (design[:, :, None] * design[:, None, :]).flatten(1)
    inverse: Tensor = torch.linalg.inv((weight @ outer).reshape(-1, count, count) + torch.diag(precision))
    return inverse
