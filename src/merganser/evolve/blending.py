"""Choose how far to trust the IRT: the c of gp-IRT and gmp-IRT, from models that the IRT has not seen.

An IRT explains the models it was fitted to, especially if they are few, and so do the items chosen with it. Each model
is therefore left out in turn: the IRT is fitted, and the items are chosen, without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from merganser.evolve.arrays import Array
from merganser.evolve.estimators import bias_variance_c, naive, p_irt, validation_error
from merganser.evolve.irt.model import IRT
from merganser.evolve.subsets import Subset

#: An IRT fitted to fewer models than this knows little about the items.
ENOUGH_MODELS = 10
#: Maximum number of folds.
FOLDS = 10


@dataclass(frozen=True)
class Unseen:
    """A model's answers to all items, with an IRT and a subset made without them."""

    answers: Array
    irt: IRT
    subset: Subset


def leave_out(answers: Array, fit: Callable[[Array], IRT], extract: Callable[[IRT], Subset]) -> Iterator[Unseen]:
    """Yield every model (row) with an IRT fitted to the models of the other folds, and the subset chosen by that."""
    if len(answers) < 2:
        return
    folds = np.arange(len(answers)) % min(FOLDS, len(answers))
    for fold in range(folds.max() + 1):
        irt = fit(answers[folds != fold])
        subset = extract(irt)
        for row in answers[folds == fold]:
            yield Unseen(row, irt, subset)


def cross_validated_c(unseen: Iterator[Unseen]) -> float:
    """Return the c in [0, 1] that minimises Σ_m (c · naive_m + (1 − c) · p-IRT_m − Z_m)² over unseen models m.

    With d_m = naive_m − p-IRT_m that is c = Σ d_m (Z_m − p-IRT_m) / Σ d_m². Missing answers do not count.

    Args:
        unseen: Models with an IRT and a subset made without them.

    Returns:
        c; 1 if no model can be left out, since then there is no evidence for the IRT.

    Example:
        >>> cross_validated_c(iter(()))
        1.0
    """
    above, below = 0.0, 0.0
    for each in unseen:
        y = each.answers[each.subset.items]
        if np.isnan(y).any():
            continue
        model = p_irt(y, each.subset, each.irt).value
        difference = naive(y, each.subset).value - model
        above += difference * (float(np.nanmean(each.answers)) - model)
        below += difference**2
    return float(np.clip(above / below, 0, 1)) if below > 0 else 1.0


def cross_validated_bias_variance_c(unseen: Iterator[Unseen]) -> float:
    """Return λ = b² / (s + b²), with the bias b and the sampling variance s of models that the IRT has not seen."""
    biases, variances = [], []
    for each in unseen:
        y = each.answers[each.subset.items]
        if not np.isnan(each.answers).any():
            biases.append(validation_error(each.irt, each.answers, each.subset))
            variances.append((naive(y, each.subset).error or 0.0) ** 2)
    return bias_variance_c(float(np.mean(biases)), float(np.mean(variances))) if biases else 1.0
