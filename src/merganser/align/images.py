"""The image of one model in the universe, and its half-images, kept without ever forming a permutation matrix.

With every array W = (m₁, …, m_k, rest) of a model and a permutation or doubly stochastic matrix P_a for each axis a,
the image is A = W ×₁ P₁ … ×_k P_k. The gradient with respect to P_a needs the image along all axes but a.

A permutation is a gather. A Frank-Wolfe step P ← (1−t)P + tV toward a permutation V is therefore a gather and a lerp of
what is already there, one axis after another; no product with a dense P is ever taken after the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from merganser.align.layout import Term, TermLayout
from merganser.kernels.assignment import Path

#: For every path a gather (m,) of integers, or a doubly stochastic matrix (m, m): rows new, columns old.
Placing = Mapping[Path, Tensor]


def place(array: Tensor, axis: int, placing: Tensor) -> Tensor:
    """One axis of an array moved by a gather or mixed by a matrix."""
    if placing.dim() == 1:
        return array.index_select(axis, placing)
    mixed: Tensor = torch.tensordot(array, placing.to(array), dims=([axis], [1]))
    return mixed.movedim(-1, axis).contiguous()


class HardImage:
    """A model placed by permutations: its weights, its gathers and its image."""

    def __init__(self, layout: TermLayout, weights: Sequence[Tensor], placing: Placing) -> None:
        self.layout = layout
        self.weights = list(weights)
        self.placing = dict(placing)
        self.full = [self._gather(term) for term in range(len(self.weights))]

    def _gather(self, term: int, skip: int | None = None) -> Tensor:
        array = self.weights[term]
        for axis, path in enumerate(self.layout.terms[term].paths):
            if axis != skip:
                array = place(array, axis, self.placing[path])
        return array

    def half(self, term: int, axis: int) -> Tensor:
        """The image of a term along every axis but one."""
        return self._gather(term, skip=axis)

    def trial(self, root: str, placing: Placing) -> dict[int, Tensor]:
        """What the images of the touched terms would be with one tree placed anew."""
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
                images[placed] = place(images[placed - {axis}], axis, placing[term.paths[axis]])
            self.partial.append(images)

    @property
    def full(self) -> list[Tensor]:
        return [images[frozenset(range(len(term.paths)))] for term, images in self._terms()]

    def half(self, term: int, axis: int) -> Tensor:
        """The image of a term along every axis but one."""
        return self.partial[term][frozenset(range(len(self.layout.terms[term].paths))) - {axis}]

    def toward(self, term: int, vertex: Placing) -> list[Tensor]:
        """The arrays B_j with A(t) = Σ_j (1−t)^(k−j) t^j B_j on the way to a vertex: j axes at it, the others here."""
        paths, images = self.layout.terms[term].paths, self.partial[term]
        every = frozenset(range(len(paths)))
        pieces = []
        for count in range(len(paths) + 1):
            moved = [self._moved(images[every - set(axes)], axes, paths, vertex) for axes in combinations(every, count)]
            total = moved[0]
            for more in moved[1:]:
                total = total.add_(more)
            pieces.append(total)
        return pieces

    @staticmethod
    def _moved(array: Tensor, axes: Sequence[int], paths: Sequence[Path], vertex: Placing) -> Tensor:
        for axis in axes:
            array = place(array, axis, vertex[paths[axis]])
        return array

    def step(self, vertex: Placing, size: float) -> None:
        """Move every placement in `vertex` the given share of the way to it."""
        for term, images in self._terms():
            for axis, path in enumerate(term.paths):
                if path in vertex:
                    for placed, image in images.items():
                        if axis in placed:
                            image.lerp_(place(images[placed - {axis}], axis, vertex[path]), size)

    def _terms(self) -> Iterator[tuple[Term, dict[frozenset[int], Tensor]]]:
        return zip(self.layout.terms, self.partial, strict=True)


def _subsets(count: int) -> Iterator[frozenset[int]]:
    """The non-empty sets of axes, small ones first."""
    for size in range(1, count + 1):
        yield from map(frozenset, combinations(range(count), size))
