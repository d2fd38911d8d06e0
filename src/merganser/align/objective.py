"""The objective of n models in one universe, in time linear in n.

The thesis sums over pairs, f = Σ_{p<q} Σ_terms ⟨A_p, A_q⟩ with A_p the image of model p. With the sum S = Σ_p A_p

    f = ½ (‖S‖² − Σ_p ‖A_p‖²),      ∂f/∂P_a = ⟨S − A_p, image of p along all axes but a⟩ over all axes but a,

and gradients take n products instead of n². Along a joint step t ∈ [0, 1] towards vertices every A_p is a polynomial of
degree k in t (k = 2 for matrices), so f has degree 2k: a quartic, maximised exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import comb

import numpy as np
import torch
from numpy.polynomial import Polynomial
from numpy.typing import NDArray
from torch import Tensor

Gram = NDArray[np.float64]
#: Entries of one product without a temporary: few enough for float32 precision.
SHORT = 1 << 14


def contract(rest: Tensor, half: Tensor, axis: int) -> Tensor:
    """Return ⟨rest[u], half[i]⟩ over all axes but one: the profit of moving old unit i to new position u."""
    size = rest.shape[axis]
    return rest.movedim(axis, 0).reshape(size, -1) @ half.movedim(axis, 0).reshape(size, -1).T


def inner(a: Tensor, b: Tensor) -> float:
    """Return ⟨a, b⟩: short products in the precision of the arrays, summed in float64."""
    return sum(float(torch.dot(x, y)) for x, y in zip(_pieces(a), _pieces(b), strict=True))


def gram(arrays: Sequence[Tensor]) -> Gram:
    """Return the inner products of all pairs, piece by piece: a piece of every array fits in cache."""
    values: Gram = np.zeros((len(arrays), len(arrays)))
    for pieces in zip(*map(_pieces, arrays), strict=True):
        for i, x in enumerate(pieces):
            for j in range(i + 1):
                values[i, j] += float(torch.dot(x, pieces[j]))
    values += np.tril(values, -1).T
    return values


def _pieces(array: Tensor) -> tuple[Tensor, ...]:
    return torch.split(array.reshape(-1), SHORT)


def sum_of(arrays: Sequence[Tensor]) -> Tensor:
    total = arrays[0].clone()
    for array in arrays[1:]:
        total.add_(array)
    return total


def best_step(along: Polynomial) -> float:
    """Return the t in [0, 1] that maximises a polynomial, among the roots of its derivative and both ends."""
    slopes = along.deriv()
    # A negligible leading coefficient would put its root far out and spoil the others.
    slopes = slopes.trim(1e-13 * float(np.abs(slopes.coef).max()))
    roots = slopes.roots() if slopes.degree() > 0 else np.array([])
    # Complex roots too: rounding can split a double root off the real axis, and checking costs nothing.
    inside = [float(root.real) for root in roots if 0.0 < root.real < 1.0]
    return max([0.0, *inside, 1.0], key=along)


def power_basis(grams: Mapping[int, Gram]) -> Polynomial:
    """Return ½ Σ_k Σ_ij c_ij b_i(t) b_j(t) with b_j(t) = (1−t)^(k−j) t^j, as coefficients of powers of t."""
    total = Polynomial([0.0])
    for degree, values in grams.items():
        total += Polynomial(0.5 * np.tensordot(values, _basis_products(degree), axes=2))
    return total


@cache
def _basis_products(degree: int) -> NDArray[np.float64]:
    """Return the coefficients of b_i(t) b_j(t) = (1−t)^(2k−i−j) t^(i+j) in powers of t: (k+1, k+1, 2k+1)."""
    products = np.zeros((degree + 1, degree + 1, 2 * degree + 1))
    for i, j in np.ndindex(degree + 1, degree + 1):
        free = 2 * degree - i - j
        for power in range(free + 1):
            products[i, j, i + j + power] = comb(free, power) * (-1) ** power
    return products
