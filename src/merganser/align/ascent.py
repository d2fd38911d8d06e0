"""Coordinate ascent: one tree of one model at a time, each an exact assignment.

With everything else fixed, f = ⟨A_p, S − A_p⟩ + const is linear in one tree of one model, so its best permutation is
one (nested) linear assignment and f cannot decrease. This move is Git Re-Basin's weight matching (two models, one of
them fixed), the inner loop of MergeMany, the rounding of a soft solution and the polish of a hard one; they differ in
the order of the moves. If a tree is on two axes of one tensor, f is not linear in it, and a move that would lower f is
not made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from merganser.align.assignments import Assignments, Coordinate
from merganser.align.objective import inner
from merganser.align.placements import HardImage, Placement, Placing, SoftImage, score_placing
from merganser.kernels.assignment import Permutations


@dataclass(frozen=True)
class Step:
    """One line of a trace: the objective; for Frank-Wolfe also the gap and the step size; for the straight-through
    estimator the loss of the midpoint. Within a run f never decreases.
    """

    phase: str
    objective: float
    gap: float | None = None
    size: float | None = None
    loss: float | None = None
    run: int = 0


def coordinates(placement: Placement) -> list[Coordinate]:
    return [(model, root) for model in placement.free for root in placement.layout.trees]


def round_images(placement: Placement, assignments: Assignments) -> list[Permutations]:
    """Round every soft placement to a permutation, one coordinate after another, without lowering f."""
    layout = placement.layout
    found: list[Permutations] = [{} for _ in placement.images]
    for model, root in coordinates(placement):
        image = placement.images[model]
        if not isinstance(image, SoftImage):
            raise TypeError("only soft images are rounded")
        linear = placement.linearise(model, root)
        solution, _ = assignments.best((model, root), layout.trees[root], linear.profits)
        found[model] |= solution
        image.step(layout.gathers(root, solution), 1.0)
        for term, rest in linear.rests.items():
            placement.total[term] = rest.add_(image.full[term])
    return found


class Ascent:
    """Moves that raise the objective of hard placements, skipping those whose surroundings have not changed.

    A gain of at most `least_gain` is rounding error.
    """

    def __init__(
        self, placement: Placement, permutations: Sequence[Permutations], assignments: Assignments | None = None
    ) -> None:
        self.placement = placement
        self.permutations = [dict(p) for p in permutations]
        self.assignments = assignments or Assignments()
        self._moves = [0] * len(placement.layout.terms)
        self._seen: dict[Coordinate, list[int]] = {}
        smooth = any(atom.group != "permutation" for atom in placement.layout.symmetry.atoms.values())
        share = 1e-6 if smooth else 4 * torch.finfo(placement.total[0].dtype).eps if placement.total else 0.0
        self.least_gain = share * placement.bound()

    def sweep(self, order: Iterable[Coordinate]) -> float:
        """Try the coordinates in turn; return the gain in f."""
        return sum(self.improve(*coordinate) for coordinate in order)

    def improve(self, model: int, root: str) -> float:
        """Find the best permutation of one tree of one model, apply it if it raises f, and return the gain."""
        layout, image = self.placement.layout, self._image(model)
        terms = list(dict.fromkeys(term for term, _ in layout.places[root]))
        surroundings = [self._moves[term] for term in terms]
        if self._seen.get((model, root)) == surroundings:
            return 0.0
        self._seen[model, root] = surroundings
        linear = self.placement.linearise(model, root)
        solution, value = self.assignments.best((model, root), layout.trees[root], linear.profits)
        placing = layout.gathers(root, solution)
        if linear.exact:
            gain = value - score_placing(linear.profits, image.placing)
            images = linear.images(placing) if gain > self.least_gain else {}
        else:
            images = image.trial(root, placing)
            gain = sum(inner(images[term] - image.full[term], linear.rests[term]) for term in terms)
        if gain <= self.least_gain:
            return 0.0
        self._take(model, solution, placing, images, linear.rests)
        if linear.exact:  # the move does not change this tree's own problem
            self._seen[model, root] = [self._moves[term] for term in terms]
        return gain

    def set(self, model: int, root: str, solution: Permutations) -> None:
        """Set one tree of one model, whatever the effect on f."""
        placing = self.placement.layout.gathers(root, solution)
        images = self._image(model).trial(root, placing)
        self._take(model, solution, placing, images, {term: self.placement.rest(model, term) for term in images})

    def _take(
        self,
        model: int,
        solution: Permutations,
        placing: Placing,
        images: Mapping[int, Tensor],
        rests: Mapping[int, Tensor],
    ) -> None:
        for term, image in images.items():
            self.placement.total[term] = rests[term].add_(image)
            self._moves[term] += 1
        self._image(model).set(placing, images)
        self.permutations[model] |= solution

    def _image(self, model: int) -> HardImage:
        image = self.placement.images[model]
        if not isinstance(image, HardImage):
            raise TypeError("coordinate ascent moves hard images")
        return image


def polish(ascent: Ascent, tolerance: float = 0.0, max_sweeps: int = 100) -> list[Step]:
    """Sweep over all coordinates in order until a sweep gains no more than a share `tolerance` of f."""
    trace: list[Step] = []
    for _ in range(max_sweeps):
        gain = ascent.sweep(coordinates(ascent.placement))
        if gain > 0.0:
            trace.append(Step("polish", ascent.placement.objective()))
        if gain == 0.0 or gain <= tolerance * abs(trace[-1].objective):
            break
    return trace
