"""Frank-Wolfe on the global objective: all trees of all free models at once.

Each iteration linearises f, solves the linear problem exactly (one assignment for each tree and model, in parallel),
and moves to the maximum of the exact polynomial f(t) between the current point and that vertex. Its slope at t = 0 is
the Frank-Wolfe gap, the remaining gain of the linearisation: the iteration stops when it is small relative to the
largest value f could have. Deterministic; f never decreases.
"""

from __future__ import annotations

from dataclasses import dataclass

from merganser.align.ascent import Step
from merganser.align.assignments import Assignments
from merganser.align.objective import best_step
from merganser.align.placements import Placement, Placing, SoftImage


@dataclass(frozen=True)
class FrankWolfe:
    """Stop when the gap, or the gain of the last `patience` steps together, is at most tolerance · ½(n−1)Σ‖W‖².

    The second rule ends the slow approach to a soft stationary point, which rounding leaves anyway.

    A polished solution is a vertex that no single move improves. Mixed with `warmth` of the barycentre it is a soft
    point near a good solution, from which the same iteration usually ends higher: this is repeated up to `reheats`
    times, as long as it helps. All polishes but the last end with a sweep that gains no more than a share `roughness`
    of the objective.
    """

    tolerance: float = 1e-3
    patience: int = 5
    max_iterations: int = 200
    reheats: int = 2
    warmth: float = 0.5
    roughness: float = 1e-3

    def run(self, placement: Placement, assignments: Assignments | None = None) -> list[Step]:
        """Move the soft images of a placement to a stationary point; return the trace."""
        assignments = assignments or Assignments()
        small = self.tolerance * placement.bound()
        trace: list[Step] = []
        for _ in range(self.max_iterations):
            vertices = linear_maximum(placement, assignments)
            along = placement.along(vertices)
            gap, size = float(along.deriv()(0.0)), best_step(along)
            trace.append(Step("frank_wolfe", float(along(0.0)), gap, size))
            stalled = len(trace) > self.patience and trace[-1].objective - trace[-1 - self.patience].objective <= small
            if gap <= small or size == 0.0 or stalled:
                break
            for image, vertex in zip(placement.images, vertices, strict=True):
                if vertex is not None and isinstance(image, SoftImage):
                    image.step(vertex, size)
            placement.refresh()
        return trace


def linear_maximum(placement: Placement, assignments: Assignments) -> list[Placing | None]:
    """Return the permutations that maximise the linearised objective, as gathers; None for fixed models."""
    layout = placement.layout
    problems = {}
    for model in placement.free:
        profits = placement.all_profits(model)
        for root, tree in layout.trees.items():
            problems[model, root] = tree, {path: profits[path] for path in layout.paths[root]}
    vertices: list[Placing | None] = [None] * len(placement.images)
    for (model, root), (solution, _) in assignments.solve(problems).items():
        vertices[model] = {**(vertices[model] or {}), **layout.gathers(root, solution)}
    return vertices
