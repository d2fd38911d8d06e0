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
        solved = _solve_once(layout, weights, held, start, seed + run, solver, Assignments(workers))
        label = start if isinstance(start, str) else "given"
        tries.append(Try(label, seed + run, solved.objective, perf_counter() - clock))
        best = solved if best is None or solved.objective > best.objective else best
    assert best is not None
    return replace(best, tries=tries)


def _solve_once(
    layout: TermLayout,
    weights: Sequence[Sequence[Tensor]],
    held: frozenset[int],
    start: Start,
    seed: int,
    solver: FrankWolfe,
    assignments: Assignments,
) -> Solved:
    """Solve from the start, and from softened solutions while that improves; polish the best."""
    placings = start_placings(layout, len(weights), start, seed, held)
    if start == "propagate":
        begun = _propagated(layout, weights, held, assignments)
        best = _polished(layout, weights, held, begun, placings, "propagate", solver.roughness, assignments)
    else:
        best = _run(layout, weights, held, placings, solver, assignments)
    trace, taken = list(best.trace), 0
    for run in range(1, solver.reheats + 1):
        softened = [
            placing if model in held else soften(hard_placing(layout, permutations), solver.warmth)
            for model, (placing, permutations) in enumerate(zip(placings, best.permutations, strict=True))
        ]
        again = _run(layout, weights, held, softened, solver, assignments)
        trace += [replace(step, run=run) for step in again.trace]
        if again.objective <= best.objective:
            break
        best, taken = again, run
    last = _polished(layout, weights, held, best.permutations, placings, "polish", 0.0, assignments)
    trace += [replace(step, run=taken) for step in last.trace]
    permutations = list(last.permutations)
    for model in held:
        permutations[model] = identity(layout.symmetry) if isinstance(start, str) else start[model]
    return Solved(permutations, last.objective, trace)


def _run(
    layout: TermLayout,
    weights: Sequence[Sequence[Tensor]],
    held: frozenset[int],
    placings: Sequence[Placing],
    solver: FrankWolfe,
    assignments: Assignments,
) -> Solved:
    """Run Frank-Wolfe, rounding and a rough polish; the permutations of fixed models are left empty."""
    soft = Placement(
        layout,
        [
            HardImage(layout, w, p) if model in held else SoftImage(layout, w, p)
            for model, (w, p) in enumerate(zip(weights, placings, strict=True))
        ],
        held,
    )
    trace = solver.run(soft, assignments)
    rounded = round_images(soft, assignments)
    del soft  # the partial images take most of the memory
    found = _polished(layout, weights, held, rounded, placings, "rounding", solver.roughness, assignments)
    return replace(found, trace=trace + found.trace)


def _propagated(
    layout: TermLayout, weights: Sequence[Sequence[Tensor]], held: frozenset[int], assignments: Assignments
) -> list[Permutations]:
    """Place every free model by itself beside one that stays: a fixed one, or the first."""
    still = identity(layout.symmetry)
    beside = min(held, default=0)
    found = [still] * len(weights)
    for model in range(len(weights)):
        if model not in held and model != beside:
            pair = hard_placement(layout, [weights[beside], weights[model]], [still, still], held=frozenset({0}))
            ascent = Ascent(pair, [still, still], Assignments(assignments.workers))
            propagate(ascent, 1)
            found[model] = ascent.permutations[1]
    return found


def _polished(
    layout: TermLayout,
    weights: Sequence[Sequence[Tensor]],
    held: frozenset[int],
    permutations: Sequence[Permutations],
    placings: Sequence[Placing],
    phase: str,
    tolerance: float,
    assignments: Assignments,
) -> Solved:
    """Run coordinate ascent from permutations; those of fixed models follow from their placings."""
    found = [placings[m] if m in held else hard_placing(layout, p) for m, p in enumerate(permutations)]
    placement = Placement(layout, [HardImage(layout, w, p) for w, p in zip(weights, found, strict=True)], held)
    trace = [Step(phase, placement.objective())]
    ascent = Ascent(placement, permutations, assignments)
    trace += polish(ascent, tolerance)
    placement.refresh()
    return Solved(ascent.permutations, placement.objective(), trace)
