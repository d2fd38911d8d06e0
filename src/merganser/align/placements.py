"""The image of a model in the universe, and its half-images, without forming permutation matrices.

With every array W = (m₁, …, m_k, rest) of a model and a permutation or doubly stochastic matrix P_a for each axis a,
the image is A = W ×₁ P₁ … ×_k P_k. The gradient with respect to P_a needs the image along all axes but a.

A permutation is a gather. A Frank-Wolfe step P ← (1−t)P + tV towards a permutation V is therefore a gather and a lerp
of the current image, one axis after another; no product with a dense P is computed after the start.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from merganser.align.blocks import move
from merganser.align.objective import Gram, contract, gram, inner, power_basis, sum_of
from merganser.align.terms import Term, TermLayout
from merganser.kernels.assignment import Path
from merganser.kernels.linear_assignment import Profit

#: For every path a gather (m,) of integers, or a doubly stochastic matrix (m, m): rows new, columns old.
Placing = Mapping[Path, Tensor]


class HardImage:
    """A model placed by permutations: its weights, its gathers and its image."""

    def __init__(self, layout: TermLayout, weights: Sequence[Tensor], placing: Placing) -> None:
        self.layout = layout
        self.weights = list(weights)
        self.placing = dict(placing)
        self.full = [self._gather(term) for term in range(len(self.weights))]
        self.squares = sum(inner(w, w) for w in self.weights)  # and of the image: moving units keeps the norm

    def _gather(self, term: int, skip: int | None = None) -> Tensor:
        array = self.weights[term]
        for axis, path in enumerate(self.layout.terms[term].paths):
            if axis != skip:
                array = move(array, axis, self.placing[path])
        return array

    def half(self, term: int, axis: int) -> Tensor:
        """Return the image of a term along every axis but one."""
        return self._gather(term, skip=axis)

    def trial(self, root: str, placing: Placing) -> dict[int, Tensor]:
        """Return the images of the affected terms if one tree had another placing."""
        before = self.placing
        self.placing = before | dict(placing)
        images = {term: self._gather(term) for term in dict.fromkeys(t for t, _ in self.layout.places[root])}
        self.placing = before
        return images

    def set(self, placing: Placing, images: Mapping[int, Tensor]) -> None:
        self.placing |= placing
        for term, image in images.items():
            self.full[term] = image


class SoftImage:
    """A model placed by doubly stochastic matrices: its image and every partial image, by the set of placed axes."""

    def __init__(self, layout: TermLayout, weights: Sequence[Tensor], placing: Placing) -> None:
        self.layout = layout
        self.weights = list(weights)
        self.partial: list[dict[frozenset[int], Tensor]] = []
        for term, weight in zip(layout.terms, weights, strict=True):
            images = {frozenset[int](): weight}
            for placed in _subsets(len(term.paths)):
                axis = min(placed)
                images[placed] = move(images[placed - {axis}], axis, placing[term.paths[axis]])
            self.partial.append(images)

    @property
    def squares(self) -> float:
        return sum(inner(image, image) for image in self.full)

    @property
    def full(self) -> list[Tensor]:
        return [images[frozenset(range(len(term.paths)))] for term, images in self._terms()]

    def half(self, term: int, axis: int) -> Tensor:
        """Return the image of a term along every axis but one."""
        return self.partial[term][frozenset(range(len(self.layout.terms[term].paths))) - {axis}]

    def toward(self, term: int, vertex: Placing) -> list[Tensor]:
        """Return the arrays B_j with A(t) = Σ_j (1−t)^(k−j) t^j B_j on the way to a vertex: j axes at it, the others
        here.
        """
        paths, images = self.layout.terms[term].paths, self.partial[term]
        every = frozenset(range(len(paths)))
        pieces = []
        for count in range(len(paths) + 1):
            moved = [
                self._move_axes(images[every - set(axes)], axes, paths, vertex) for axes in combinations(every, count)
            ]
            total = moved[0]
            for more in moved[1:]:
                total = total.add_(more)
            pieces.append(total)
        return pieces

    @staticmethod
    def _move_axes(array: Tensor, axes: Sequence[int], paths: Sequence[Path], vertex: Placing) -> Tensor:
        for axis in axes:
            array = move(array, axis, vertex[paths[axis]])
        return array

    def step(self, vertex: Placing, size: float) -> None:
        """Move every placement in `vertex` the given share of the way to it."""
        for term, images in self._terms():
            for axis, path in enumerate(term.paths):
                if path in vertex:
                    for placed, image in images.items():
                        if axis in placed:
                            image.lerp_(move(images[placed - {axis}], axis, vertex[path]), size)

    def _terms(self) -> Iterator[tuple[Term, dict[frozenset[int], Tensor]]]:
        return zip(self.layout.terms, self.partial, strict=True)


Image = HardImage | SoftImage


@dataclass(frozen=True)
class Linearised:
    """The objective as a linear function of one tree of one model, everything else fixed.

    Attributes:
        layout: The terms.
        profits: The gradient.
        rests: For every term with the tree, the sum of the images of all other models.
        halves: For every term and axis with the tree, the image of the model along all other axes.
    """

    layout: TermLayout
    profits: dict[Path, Profit]
    rests: dict[int, Tensor]
    halves: dict[tuple[int, int], Tensor]

    @property
    def exact(self) -> bool:
        """Whether the objective is linear: no term has the tree on two axes."""
        return len(self.rests) == len(self.halves)

    def images(self, placing: Placing) -> dict[int, Tensor]:
        """Return the images of the terms if the tree had another placing; it must be on one axis of each."""
        paths = {(term, axis): self.layout.terms[term].paths[axis] for term, axis in self.halves}
        return {term: move(half, axis, placing[paths[term, axis]]) for (term, axis), half in self.halves.items()}


def score_placing(profits: Mapping[Path, Profit], placing: Placing) -> float:
    """Return the value of a placing, ⟨profit, P⟩ summed over the paths."""
    value = 0.0
    for path, profit in profits.items():
        place = placing[path].cpu().numpy()
        flat = profit.reshape(len(place), len(place))
        value += float((flat[np.arange(len(place)), place] if place.ndim == 1 else flat * place).sum(dtype=np.float64))
    return value


class Placement:
    """The positions of n models in the universe. Models in `held` take part but are fixed."""

    def __init__(self, layout: TermLayout, images: Sequence[Image], held: frozenset[int] = frozenset()) -> None:
        self.layout = layout
        self.images = list(images)
        self.held = held
        self.refresh()

    @property
    def free(self) -> list[int]:
        return [model for model in range(len(self.images)) if model not in self.held]

    def refresh(self) -> None:
        """Recompute the running sum from the images."""
        fulls = [image.full for image in self.images]
        self.total = [sum_of([full[term] for full in fulls]) for term in range(len(self.layout.terms))]

    def objective(self) -> float:
        value = sum(inner(total, total) for total in self.total)
        return 0.5 * (value - sum(image.squares for image in self.images))

    def bound(self) -> float:
        """Return an upper bound of the objective: ½ (n − 1) Σ_p ‖W_p‖²."""
        return 0.5 * (len(self.images) - 1) * sum(inner(w, w) for image in self.images for w in image.weights)

    def rest(self, model: int, term: int) -> Tensor:
        """Return the sum of the images of all other models."""
        return self.total[term] - self.images[model].full[term]

    def linearise(self, model: int, root: str, among: Container[int] | None = None) -> Linearised:
        """Return f, or the terms of it in `among`, as a linear function of one tree of one model."""
        places = [place for place in self.layout.places[root] if among is None or place[0] in among]
        rests = {term: self.rest(model, term) for term in dict.fromkeys(term for term, _ in places)}
        halves = {place: self.images[model].half(*place) for place in places}
        found: dict[Path, Tensor] = {}
        for (term, axis), half in halves.items():
            self._accumulate(found, term, axis, rests[term], half)
        return Linearised(self.layout, self._as_profits(found), rests, halves)

    def all_profits(self, model: int) -> dict[Path, Profit]:
        """Return the gradient of f with respect to every placement of one model."""
        found: dict[Path, Tensor] = {}
        for term, paths in enumerate(term.paths for term in self.layout.terms):
            rest = self.rest(model, term)
            for axis in range(len(paths)):
                self._accumulate(found, term, axis, rest, self.images[model].half(term, axis))
        return self._as_profits(found)

    def _accumulate(self, found: dict[Path, Tensor], term: int, axis: int, rest: Tensor, half: Tensor) -> None:
        product = contract(rest, half, axis)
        path = self.layout.terms[term].paths[axis]
        found[path] = found[path].add_(product) if path in found else product

    def _as_profits(self, found: dict[Path, Tensor]) -> dict[Path, Profit]:
        return {path: value.cpu().numpy().reshape(self.layout.sizes(path) * 2) for path, value in found.items()}

    def along(self, vertices: Sequence[Placing | None]) -> Polynomial:
        """Return f on the way from here (t = 0) to the vertices (t = 1); None for a fixed model."""
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
            # The first piece of every model is its current image, whose sum is already known.
            grams[degree] = grams.get(degree, 0.0) + gram([self.total[term], *totals]) - alone
        return power_basis(grams)

    @staticmethod
    def _pieces(image: Image, term: int, degree: int, vertex: Placing | None) -> list[Tensor]:
        if vertex is None or isinstance(image, HardImage):
            return [comb(degree, count) * image.full[term] for count in range(degree + 1)]
        return image.toward(term, vertex)


def _subsets(count: int) -> Iterator[frozenset[int]]:
    """Yield the non-empty sets of axes, small ones first."""
    for size in range(1, count + 1):
        yield from map(frozenset, combinations(range(count), size))
