"""The assignments of one search, each solved from the prices of the last one of the same tree of the same model."""

from __future__ import annotations

from collections.abc import Mapping

from merganser.kernels.assignment import Node, Permutations, Profits, assign_all
from merganser.kernels.linear_assignment import Prices

#: A tree (by its root) of a model.
Coordinate = tuple[int, str]


class Assignments:
    """A solver of assignments that remembers the prices of every coordinate.

    The problems of a coordinate change little from one step to the next, so that its last prices are nearly right. They
    belong to the coordinate alone: the solutions do not depend on the order of problems that are solved together.

    Args:
        workers: Threads; one for each processor by default.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers
        self._prices: dict[Coordinate, Prices] = {}

    def solve(
        self, problems: Mapping[Coordinate, tuple[Node, Profits]]
    ) -> dict[Coordinate, tuple[Permutations, float]]:
        """Return the best permutations of every coordinate, and the value they reach."""
        prices = [self._prices.setdefault(coordinate, Prices()) for coordinate in problems]
        return dict(zip(problems, assign_all(list(problems.values()), self.workers, prices), strict=True))

    def best(self, coordinate: Coordinate, node: Node, profits: Profits) -> tuple[Permutations, float]:
        """Return the best permutations of one coordinate, and the value they reach."""
        return self.solve({coordinate: (node, profits)})[coordinate]
