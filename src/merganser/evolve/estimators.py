"""Estimate: a model's score on all N items from its answers to a subset S of n (U: the items not in S).

    naive      Σ_S w y
    p-IRT      (n/N) mean_S y + (1 − n/N) mean_U p(γ̂),             γ̂ the ability fitted on S
    gp-IRT     c · naive + (1 − c) · p-IRT
    mp-IRT     (n/N) Σ_S w y + (1 − n/N) mean_U p(Σ_j ξ̂_j γ_j),    ξ̂ the mixture of endpoint abilities fitted on S
    gmp-IRT    c · naive + (1 − c) · mp-IRT

A merge of M endpoints is assumed to inherit a linear mixture of their abilities: mp-IRT has M unknowns where p-IRT has
D. It was published with ξ̂ by maximum likelihood, which diverges on small subsets; the default here is the posterior
mode under ξ_j ~ N(1/M, 0.5²).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from merganser.errors import InputError, one_of
from merganser.evolve.arrays import Array
from merganser.evolve.irt.logistic import Posterior, regress
from merganser.evolve.irt.model import IRT
from merganser.evolve.subsets import Subset

Fit = Literal["map", "mle"]
MIXTURE_SPREAD = 0.5


@dataclass(frozen=True)
class Estimate:
    """An estimated score; for IRT also its standard error (assuming the IRT) and the underlying ability."""

    value: float
    error: float | None = None
    ability: Array | None = None
    mixture: Array | None = None


def naive(answers: ArrayLike, subset: Subset) -> Estimate:
    """Return Σ_S w y with its sampling error: Bernoulli for answers in [0, 1], else from their spread."""
    y = _answers(answers, subset)
    value = float(subset.weights @ y)
    graded = y.min() >= 0 and y.max() <= 1
    variance = value * (1 - value) if graded else float(subset.weights @ (y - value) ** 2)
    return Estimate(value, (max(variance, 0.0) * float((subset.weights**2).sum())) ** 0.5)


def p_irt(answers: ArrayLike, subset: Subset, irt: IRT, *, fit: Fit = "mle") -> Estimate:
    """Fit the ability on the subset, then combine the known answers with the probabilities of the others."""
    one_of("fit", fit, Fit)
    y = _answers(answers, subset)
    ability = irt.ability(y, subset.items, prior=fit == "map")
    return _complete(float(y.mean()), subset, irt, ability.mean, ability.covariance)


def mixture(answers: ArrayLike, subset: Subset, irt: IRT, endpoints: ArrayLike, *, fit: Fit = "map") -> Posterior:
    """Return ξ̂, the coefficients of the endpoints' abilities (rows of `endpoints`) that best explain the answers."""
    one_of("fit", fit, Fit)
    gammas = np.atleast_2d(np.asarray(endpoints, dtype=np.float64))
    seen = irt.items[subset.items]
    precision = MIXTURE_SPREAD**-2 if fit == "map" else 0.0
    design = seen.discrimination @ gammas.T
    return regress(design, -seen.difficulty, _answers(answers, subset), 1 / len(gammas), precision)


def mp_irt(answers: ArrayLike, subset: Subset, irt: IRT, endpoints: ArrayLike, *, fit: Fit = "map") -> Estimate:
    """Return the same as p-IRT, with the ability a fitted mixture of the endpoints' abilities."""
    gammas = np.atleast_2d(np.asarray(endpoints, dtype=np.float64))
    xi = mixture(answers, subset, irt, gammas, fit=fit)
    known = float(subset.weights @ _answers(answers, subset))
    covariance = gammas.T @ xi.covariance @ gammas
    return _complete(known, subset, irt, xi.mean @ gammas, covariance, xi.mean)


def blend(c: float, left: Estimate, right: Estimate) -> Estimate:
    """Return c · left + (1 − c) · right: gp-IRT and gmp-IRT blend naive with p-IRT and mp-IRT.

    Both use the same answers, so the error is the bound for fully correlated estimates.
    """
    error = None if left.error is None or right.error is None else c * left.error + (1 - c) * right.error
    return Estimate(c * left.value + (1 - c) * right.value, error, right.ability, right.mixture)


def adaptive_c(answers: ArrayLike, subset: Subset, irt: IRT) -> float:
    """Return c of gmp-IRT*: the mean over endpoints (rows of `answers`, on all items) of the c ∈ [0, 1] that makes
    gp-IRT exact, or closest to exact.

    |c·naive + (1 − c)·p-IRT − Z| is piecewise linear in c, so the minimum is computed exactly instead of by a grid
    search.
    """
    best = []
    for row in np.atleast_2d(np.asarray(answers, dtype=np.float64)):
        left = naive(row[subset.items], subset).value
        right = p_irt(row[subset.items], subset, irt).value
        best.append(float(np.clip((row.mean() - right) / (left - right), 0, 1)) if left != right else 0.5)
    return float(np.mean(best))


def bias_variance_c(bias: float, sampling_variance: float) -> float:
    """Return λ = b² / (s + b²): trust the subset mean if the IRT is biased (b) and the subset large (s small)."""
    total = sampling_variance + bias**2
    return bias**2 / total if total > 0 else 0.5


def validation_error(irt: IRT, answers: ArrayLike, subset: Subset) -> float:
    """Return b, the mean |mean_U p(γ̂) − mean_U y| over models (rows of `answers`) that the IRT was not fitted on."""
    errors = []
    for row in np.atleast_2d(np.asarray(answers, dtype=np.float64)):
        unseen = np.setdiff1d(np.arange(len(row)), subset.items)
        ability = irt.ability(row[subset.items], subset.items, prior=False).mean
        errors.append(abs(float(irt.probabilities(ability)[unseen].mean() - row[unseen].mean())))
    return float(np.mean(errors))


@dataclass(frozen=True)
class Estimator:
    """One of `NAMES` with its inputs: the items' IRT, the endpoints' abilities, and c for the blends."""

    name: str = "naive"
    irt: IRT | None = None
    endpoints: Array | None = None
    c: float = 0.5
    fit: Fit | None = None

    def __post_init__(self) -> None:
        one_of("estimator", self.name, NAMES)
        if self.name != "naive" and self.irt is None:
            raise InputError(f"estimator {self.name!r} needs an IRT: fit one to answers of several models")
        if self.name in ("mp-irt", "gmp-irt") and self.endpoints is None:
            raise InputError(f"estimator {self.name!r} needs the endpoints' abilities")
        if not 0 <= self.c <= 1:
            raise InputError(f"c must lie in [0, 1], not {self.c}")

    def __call__(self, answers: ArrayLike, subset: Subset) -> Estimate:
        mean = naive(answers, subset)
        if self.irt is None or self.name == "naive":
            return mean
        if self.endpoints is None or self.name in ("p-irt", "gp-irt"):
            model = p_irt(answers, subset, self.irt, fit=self.fit or "mle")
        else:
            model = mp_irt(answers, subset, self.irt, self.endpoints, fit=self.fit or "map")
        return blend(self.c, mean, model) if self.name.startswith("g") else model


NAMES = ("naive", "p-irt", "gp-irt", "mp-irt", "gmp-irt")


@dataclass(frozen=True)
class Stability:
    """|F(θ; D) − F̂(θ; D̄_s)| for candidates θ (rows) and subsets s (columns)."""

    errors: Array

    @property
    def epsilon(self) -> float:
        """Return the empirical ε of stability in expectation: the mean over candidates and subsets."""
        return float(self.errors.mean())

    @property
    def worst(self) -> float:
        """Return the largest mean over subsets of any candidate."""
        return float(self.errors.mean(1).max())


def stability(estimator: Estimator, answers: ArrayLike, subsets: Sequence[Subset]) -> Stability:
    """Measure the error of the estimator against full evaluations over several subsets, as in the thesis.

    `answers` are full answers (candidates × items) of merged models: endpoints are in-sample and make the estimator
    look too good.
    """
    full = np.atleast_2d(np.asarray(answers, dtype=np.float64))
    return Stability(np.array([[abs(row.mean() - estimator(row[s.items], s).value) for s in subsets] for row in full]))


def compare(estimators: Mapping[str, Estimator], answers: ArrayLike, subsets: Sequence[Subset]) -> dict[str, float]:
    """Return ε of every estimator on the same candidates and subsets."""
    return {label: stability(estimator, answers, subsets).epsilon for label, estimator in estimators.items()}


def _answers(answers: ArrayLike, subset: Subset) -> Array:
    y = np.asarray(answers, dtype=np.float64)
    if y.shape != (len(subset),):
        raise InputError(f"a subset of {len(subset)} items needs as many answers, not an array of shape {y.shape}")
    return y


def _complete(
    known: float,
    subset: Subset,
    irt: IRT,
    ability: Array,
    covariance: Array,
    coefficients: Array | None = None,
) -> Estimate:
    """Return (n/N) known + (1 − n/N) mean_U p(ability); its error by the delta method plus Bernoulli noise."""
    total = len(irt.items)
    unseen = np.setdiff1d(np.arange(total), subset.items)
    if len(unseen) == 0:
        return Estimate(known, 0.0, ability, coefficients)
    rest = irt.items[unseen]
    p = irt.select(unseen).probabilities(ability)
    slope = (p * (1 - p)) @ rest.discrimination / len(unseen)
    variance = slope @ covariance @ slope + (p * (1 - p)).sum() / len(unseen) ** 2
    share = len(subset) / total
    value = share * known + (1 - share) * float(p.mean())
    return Estimate(value, (1 - share) * float(variance) ** 0.5, ability, coefficients)
