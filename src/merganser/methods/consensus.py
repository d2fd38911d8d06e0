"""Parts of task-vector methods: combine sparsified task vectors into one. All may overwrite the task vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from merganser.lazy import torch
from merganser.methods.averages import cancel

if TYPE_CHECKING:
    from torch import Tensor


def weighted_sum_(deltas: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """Return Σ w Δ, divided by Σ w if `normalize` (unless the weights cancel)."""
    divisor = sum(weights) if normalize and not cancel(weights) else 1.0
    total = deltas[0]
    if weights[0] != divisor:
        total = total.mul_(weights[0] / divisor)
    for delta, weight in zip(deltas[1:], weights[1:], strict=True):
        total.add_(delta, alpha=weight / divisor)
    return total


def elected_sum_(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return TIES' consensus as a sum: for each entry, of the models that agree with the sign of S = Σ w Δ.

    That is Σ w Δ over the models with sgn(w Δ) = sgn(S), the positive ones where S is zero. It equals (S + sgn(S) Σ |w
    Δ|)/2: models that agree have the same sign in both sums, the others opposite signs.
    """
    unit, shares = _relative(weights)
    votes = weighted_sum_([deltas[0].clone(), *deltas[1:]], shares, normalize=False)
    sizes = weighted_sum_([delta.abs_() for delta in deltas], [abs(share) for share in shares], normalize=False)
    return votes.add_(sizes.copysign_(votes)).mul_(0.5 * unit)


def elected_mean_(deltas: Sequence[Tensor], weights: Sequence[float], votes: Tensor | None = None) -> Tensor:
    """Return TIES' consensus as a mean: Σ w Δ over models with sgn(w Δ) = sgn(Σ w Δ), over the sum of their weights.

    Where Σ w Δ is zero, the positive ones are used. `votes` replaces Σ w Δ in the election.
    """
    voters = [(delta, weight) for delta, weight in zip(deltas, weights, strict=True) if weight != 0]
    if not voters:
        return deltas[0].zero_()
    if votes is None:
        votes = weighted_sum_([deltas[0].clone(), *deltas[1:]], _relative(weights)[1], normalize=False)
    # Twice sgn maps zero to +1; arithmetic on floats is many times faster here than masks and `where`.
    sign = votes.sign_().add_(0.5).sign_()
    total, divisor = torch.zeros_like(sign), torch.zeros_like(sign)
    for delta, weight in voters:
        agreeing = delta.mul_(sign)
        agreeing = agreeing.clamp_(min=0) if weight > 0 else agreeing.clamp_(max=0)
        total.add_(agreeing, alpha=weight)
        divisor.add_(agreeing.sign_(), alpha=abs(weight))
    smallest = min(weight for _, weight in voters)
    if smallest > 0:
        total.div_(divisor.clamp_(min=smallest))
    else:
        total.div_(divisor.masked_fill_(divisor == 0, 1))
    return total.mul_(sign)


def _relative(weights: Sequence[float]) -> tuple[float, list[float]]:
    """Return the largest size of a weight, and the weights divided by it.

    Task vectors with equal weights are then added as they are, so that opposite ones cancel exactly: rounded products
    would leave the sign of a tied vote to chance.
    """
    unit = max(map(abs, weights)) or 1.0
    return unit, [weight / unit for weight in weights]
