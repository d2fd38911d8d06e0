"""Solve for permutations: Frank-Wolfe, rounding, polish, and again from the softened solution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from merganser.align.ascent import Ascent, Step, polish, round_images
from merganser.align.assignments import Assignments
from merganser.align.frank_wolfe import FrankWolfe
from merganser.align.initialisation import Start, hard_placing, soften, start_placings
from merganser.align.matches import Try
from merganser.align.permutations import Permutations, identity
from merganser.align.placements import HardImage, Placement, Placing, SoftImage
from merganser.align.propagation import propagate
from merganser.align.state import State
from merganser.align.symmetries import Symmetry
from merganser.align.terms import TermLayout
from merganser.errors import InputError


@dataclass(frozen=True)
class Solved:
    """Permutations of every model, their objective, and the trace."""

    permutations: list[Permutations]
    objective: float
    trace: list[Step]
    tries: list[Try] = field(default_factory=list)


def layout_and_weights(symmetry: Symmetry, states: Sequence[State]) -> tuple[TermLayout, list[list[Tensor]]]:
    """Return the folded weights of models, in float32 unless they are stored in float64."""
    layout = TermLayout.of(symmetry)
    wide = any(states[0][name].dtype == torch.float64 for name in symmetry.objective)
    return layout, [layout.weights(state, torch.float64 if wide else torch.float32) for state in states]


def hard_placement(
    layout: TermLayout,
    weights: Sequence[Sequence[Tensor]],
    permutations: Sequence[Permutations],
    held: frozenset[int] = frozenset(),
) -> Placement:
    images = [HardImage(layout, w, hard_placing(layout, p)) for w, p in zip(weights, permutations, strict=True)]
    return Placement(layout, images, held)


def objective_of(models: Sequence[State], permutations: Sequence[Permutations], symmetry: Symmetry) -> float:
    """Return Σ_{p<q} ⟨A_p, A_q⟩ over the tensors that move."""
    layout, weights = layout_and_weights(symmetry, models)
    return hard_placement(layout, weights, permutations).objective()


def solve(
    layout: TermLayout,
    weights: Sequence[Sequence[Tensor]],
    *,
    held: frozenset[int] = frozenset(),
    start: Start = "propagate",
    starts: int = 1,
    seed: int = 0,
    solver: FrankWolfe | None = None,
    workers: int | None = None,
) -> Solved:
    """Return the best of `starts` runs (more than one only makes sense for random starts)."""
    if starts < 1:
        raise InputError(f"starts must be at least 1, got {starts}")
    if starts > 1 and start != "sinkhorn":
        raise InputError(f"several starts need start='sinkhorn': {start!r} gives the same solution every time")
    solver = solver or FrankWolfe()
    best: Solved | None = None
    tries: list[Try] = []
    for run in range(starts):
        clock = perf_counter()
        solved = _Run(layout, weights, held, solver, Assignments(workers)).solve(start, seed + run)
        label = start if isinstance(start, str) else "given"
        tries.append(Try(label, seed + run, solved.objective, perf_counter() - clock))
        best = solved if best is None or solved.objective > best.objective else best
    assert best is not None
    return replace(best, tries=tries)


@dataclass(frozen=True)
class _Run:
    """One run: the weights of the models, those whose permutations are fixed, and how to search."""

    layout: TermLayout
    weights: Sequence[Sequence[Tensor]]
    held: frozenset[int]
    solver: FrankWolfe
    assignments: Assignments

    def solve(self, start: Start, seed: int) -> Solved:
        """Solve from the start, and from softened solutions while that improves; polish the best."""
        placings = start_placings(self.layout, len(self.weights), start, seed, self.held)
        if start == "propagate":
            best = self._polish(self._propagate(), placings, "propagate", self.solver.roughness)
        else:
            best = self._search(placings)
        trace, taken = list(best.trace), 0
        for run in range(1, self.solver.reheats + 1):
            softened = [
                placing if model in self.held else soften(hard_placing(self.layout, permutations), self.solver.warmth)
                for model, (placing, permutations) in enumerate(zip(placings, best.permutations, strict=True))
            ]
            again = self._search(softened)
            trace += [replace(step, run=run) for step in again.trace]
            if again.objective <= best.objective:
                break
            best, taken = again, run
        last = self._polish(best.permutations, placings, "polish", 0.0)
        trace += [replace(step, run=taken) for step in last.trace]
        permutations = list(last.permutations)
        for model in self.held:
            permutations[model] = identity(self.layout.symmetry) if isinstance(start, str) else start[model]
        return Solved(permutations, last.objective, trace)

    def _search(self, placings: Sequence[Placing]) -> Solved:
        """Run Frank-Wolfe, rounding and a rough polish; the permutations of fixed models are left empty."""
        images = [
            (HardImage if model in self.held else SoftImage)(self.layout, w, placing)
            for model, (w, placing) in enumerate(zip(self.weights, placings, strict=True))
        ]
        soft = Placement(self.layout, images, self.held)
        trace = self.solver.run(soft, self.assignments)
        rounded = round_images(soft, self.assignments)
        del soft, images  # the partial images take most of the memory
        found = self._polish(rounded, placings, "rounding", self.solver.roughness)
        return replace(found, trace=trace + found.trace)

    def _propagate(self) -> list[Permutations]:
        """Place every free model by itself beside one that stays: a fixed one, or the first."""
        still = identity(self.layout.symmetry)
        beside = min(self.held, default=0)
        found = [still] * len(self.weights)
        for model in range(len(self.weights)):
            if model not in self.held and model != beside:
                both = [self.weights[beside], self.weights[model]]
                pair = hard_placement(self.layout, both, [still, still], held=frozenset({0}))
                ascent = Ascent(pair, [still, still], Assignments(self.assignments.workers))
                propagate(ascent, 1)
                found[model] = ascent.permutations[1]
        return found

    def _polish(
        self, permutations: Sequence[Permutations], placings: Sequence[Placing], phase: str, tolerance: float
    ) -> Solved:
        """Run coordinate ascent from permutations; those of fixed models follow from their placings."""
        found = [placings[m] if m in self.held else hard_placing(self.layout, p) for m, p in enumerate(permutations)]
        images = [HardImage(self.layout, w, p) for w, p in zip(self.weights, found, strict=True)]
        placement = Placement(self.layout, images, self.held)
        trace = [Step(phase, placement.objective())]
        ascent = Ascent(placement, permutations, self.assignments)
        trace += polish(ascent, tolerance)
        placement.refresh()
        return Solved(ascent.permutations, placement.objective(), trace)
