"""The objective of n models in one universe, in time linear in n.

The thesis sums over pairs, f = Σ_{p<q} Σ_terms ⟨A_p, A_q⟩ with A_p the image of model p. With the sum S = Σ_p A_p

    f = ½ (‖S‖² − Σ_p ‖A_p‖²),      ∂f/∂P_a = ⟨S − A_p, image of p along all axes but a⟩ over all axes but a,

and gradients take n products instead of n². Along a joint step t ∈ [0, 1] toward vertices every A_p is a polynomial of
degree k in t (k = 2 for matrices), hence f is one of degree 2k: a quartic, maximised exactly.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cache
from math import comb

import numpy as np
import torch
from numpy.polynomial import Polynomial
from numpy.typing import NDArray
from torch import Tensor

from merganser.align.images import HardImage, Placing, SoftImage
from merganser.align.layout import TermLayout
from merganser.kernels.assignment import Path, Profit

Image = HardImage | SoftImage
Gram = NDArray[np.float64]
#: Entries of one product without a temporary: few enough that float32 loses nothing that matters.
SHORT = 1 << 14


class Placement:
    """Where n models stand in the universe. The models in `held` take part but are not moved."""

    def __init__(self, layout: TermLayout, images: Sequence[Image], held: frozenset[int] = frozenset()) -> None:
        self.layout = layout
        self.images = list(images)
        self.held = held
        self.refresh()

    @property
    def free(self) -> list[int]:
        return [model for model in range(len(self.images)) if model not in self.held]

    def refresh(self) -> None:
        """The running sum, from the images."""
        fulls = [image.full for image in self.images]
        self.total = [sum_of([full[term] for full in fulls]) for term in range(len(self.layout.terms))]

    def objective(self) -> float:
        value = sum(inner(total, total) for total in self.total)
        return 0.5 * (value - sum(inner(a, a) for image in self.images for a in image.full))

    def bound(self) -> float:
        """No placement has a higher objective: ½ (n − 1) Σ_p ‖W_p‖²."""
        return 0.5 * (len(self.images) - 1) * sum(inner(w, w) for image in self.images for w in image.weights)

    def rest(self, model: int, term: int) -> Tensor:
        """The sum of the images of all other models."""
        return self.total[term] - self.images[model].full[term]

    def profits(self, model: int, root: str, among: Container[int] | None = None) -> dict[Path, Profit]:
        """The gradient of f, or of the terms `among` its own, with respect to one tree of one model."""
        found: dict[Path, Tensor] = {}
        rests: dict[int, Tensor] = {}
        for term, axis in self.layout.places[root]:
            if among is not None and term not in among:
                continue
            if term not in rests:
                rests[term] = self.rest(model, term)
            self._accumulate(found, model, term, axis, rests[term])
        return self._as_profits(found)

    def all_profits(self, model: int) -> dict[Path, Profit]:
        """The gradient of f with respect to every placement of one model."""
        found: dict[Path, Tensor] = {}
        for term, paths in enumerate(term.paths for term in self.layout.terms):
            rest = self.rest(model, term)
            for axis in range(len(paths)):
                self._accumulate(found, model, term, axis, rest)
        return self._as_profits(found)

    def _accumulate(self, found: dict[Path, Tensor], model: int, term: int, axis: int, rest: Tensor) -> None:
        product = contract(rest, self.images[model].half(term, axis), axis)
        path = self.layout.terms[term].paths[axis]
        found[path] = found[path].add_(product) if path in found else product

    def _as_profits(self, found: dict[Path, Tensor]) -> dict[Path, Profit]:
        return {path: value.cpu().numpy().reshape(self.layout.sizes(path) * 2) for path, value in found.items()}

    def along(self, vertices: Sequence[Placing | None]) -> Polynomial:
        """f on the way from here (t = 0) to the vertices (t = 1); None for a model that stays."""
        grams: dict[int, Gram] = {}
        for term in range(len(self.layout.terms)):
            degree = len(self.layout.terms[term].paths)
            totals = [torch.zeros_like(self.total[term]) for _ in range(degree)]
            alone = np.zeros((degree + 1, degree + 1))
            for image, vertex in zip(self.images, vertices, strict=True):
                pieces = self._pieces(image, term, degree, vertex)
                alone += gram(pieces)
                for total, piece in zip(totals, pieces[1:], strict=True):
                    total.add_(piece)
            # The first piece of every model is where it stands, so their sum is there already.
            grams[degree] = grams.get(degree, 0.0) + gram([self.total[term], *totals]) - alone
        return _power_basis(grams)

    @staticmethod
    def _pieces(image: Image, term: int, degree: int, vertex: Placing | None) -> list[Tensor]:
        if vertex is None or isinstance(image, HardImage):
            return [comb(degree, count) * image.full[term] for count in range(degree + 1)]
        return image.toward(term, vertex)


def contract(rest: Tensor, half: Tensor, axis: int) -> Tensor:
    """⟨rest[u], half[i]⟩ over all axes but one: the profit of putting old unit i at new place u."""
    size = rest.shape[axis]
    return rest.movedim(axis, 0).reshape(size, -1) @ half.movedim(axis, 0).reshape(size, -1).T


def inner(a: Tensor, b: Tensor) -> float:
    """⟨a, b⟩: short products in the precision of the arrays, summed in float64."""
    x, y = a.reshape(-1), b.reshape(-1)
    return sum(float(torch.dot(x[i : i + SHORT], y[i : i + SHORT])) for i in range(0, len(x), SHORT))


def gram(arrays: Sequence[Tensor]) -> Gram:
    values = np.empty((len(arrays), len(arrays)))
    for i, a in enumerate(arrays):
        for j in range(i + 1):
            values[i, j] = values[j, i] = inner(a, arrays[j])
    return values


def sum_of(arrays: Sequence[Tensor]) -> Tensor:
    total = arrays[0].clone()
    for array in arrays[1:]:
        total.add_(array)
    return total


def best_step(along: Polynomial) -> float:
    """The t in [0, 1] where a polynomial is highest: the real roots of its derivative, and both ends."""
    slopes = along.deriv()
    # A leading coefficient that is nothing beside the others would throw its root far out and spoil the rest.
    slopes = slopes.trim(1e-13 * float(np.abs(slopes.coef).max()))
    roots = slopes.roots() if slopes.degree() > 0 else np.array([])
    # Complex roots too: rounding can split a double root off the real axis, and a look costs nothing.
    inside = [float(root.real) for root in roots if 0.0 < root.real < 1.0]
    return max([0.0, *inside, 1.0], key=along)


def _power_basis(grams: Mapping[int, Gram]) -> Polynomial:
    """½ Σ_k Σ_ij c_ij b_i(t) b_j(t) with b_j(t) = (1−t)^(k−j) t^j, as coefficients of the powers of t."""
    total = Polynomial([0.0])
    for degree, values in grams.items():
        total += Polynomial(0.5 * np.tensordot(values, _basis_products(degree), axes=2))
    return total


@cache
def _basis_products(degree: int) -> NDArray[np.float64]:
    """The coefficients of b_i(t) b_j(t) = (1−t)^(2k−i−j) t^(i+j) in powers of t: (k+1, k+1, 2k+1)."""
    products = np.zeros((degree + 1, degree + 1, 2 * degree + 1))
    for i, j in np.ndindex(degree + 1, degree + 1):
        free = 2 * degree - i - j
        for power in range(free + 1):
            products[i, j, i + j + power] = comb(free, power) * (-1) ** power
    return products
