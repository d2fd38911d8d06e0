"""Linear assignment, plain and nested.

A permutation of m units is an index array p with `new[u] = old[p[u]]`. Its profit is linear, Σ_u profit[u, p[u]]: rows
are the new positions, columns the old units, and `assign` maximises it.

Units may form a tree: heads, and an order of the dimensions inside every head. The permutations of such a tree form a
wreath product, and nesting maximises a linear profit over it exactly: for every pair of outer indices solve the inner
problem, then solve the outer problem on the values of the inner ones.

A leaf of the tree may be rotated instead of permuted: its orthogonal matrix R, `new = R @ old`, that maximises
⟨profit, R⟩ is the polar factor of the profit (Procrustes).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from merganser.errors import InputError
from merganser.kernels.linear_assignment import Prices, Profit, assign, value_of

#: The nodes, from the root down, whose indices together address an axis: ("head",) or ("head", "dim").
Path = tuple[str, ...]
Profits = Mapping[Path, Profit]
#: Permutations of units, all orthogonal maps of them, or those that keep the sum of the units.
SymmetryGroup = Literal["permutation", "orthogonal", "centred"]
#: Node name -> permutation (size,) or matrix (size, size); below the root, one for every *new* place of the parent.
Permutations = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Node:
    """A set of `size` units to be permuted, or rotated if it has no children; those are permuted inside each unit."""

    name: str
    size: int
    children: tuple[Node, ...] = ()
    group: SymmetryGroup = "permutation"

    def walk(self) -> Iterator[Node]:
        """Yield this node and everything below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def identity(self) -> Permutations:
        """Return permutations that keep every unit in place."""
        still = np.arange(self.size, dtype=np.int64) if self.group == "permutation" else np.eye(self.size)
        solution: Permutations = {self.name: still}
        for child in self.children:
            for name, index in child.identity().items():
                solution[name] = np.broadcast_to(index, (self.size, *index.shape)).copy()
        return solution


def rotate(profit: Profit, group: SymmetryGroup = "orthogonal") -> NDArray[np.float64]:
    """Return the orthogonal R that maximises ⟨profit, R⟩: U Vᵀ for profit = U S Vᵀ; "centred" maps keep the sum."""
    profit = profit.astype(np.float64)
    if group == "centred":
        basis = centred_basis(len(profit))
        rotation: NDArray[np.float64] = basis @ rotate(basis.T @ profit @ basis) @ basis.T + 1.0 / len(profit)
    else:
        left, _, right = np.linalg.svd(profit)
        rotation = left @ right
    return rotation


def centred_basis(size: int) -> NDArray[np.float64]:
    """Return an orthonormal basis (size, size − 1) of the vectors whose entries sum to zero (Helmert)."""
    basis = np.triu(np.ones((size, size - 1)))
    places = np.arange(1, size)
    basis[places, places - 1] = -places
    return basis / np.sqrt(places * (places + 1.0))


def assign_tree(
    node: Node, profits: Profits, mapper: Callable[..., Iterable[Any]] = map, prices: Prices | None = None
) -> tuple[Permutations, float]:
    """Return the permutations of a tree that maximise the summed profits of its paths, and their value.

    `profits[path]` has the sizes of the path's nodes twice: as new positions, then as old units. Exact, unless two
    children of one node are on one path: that problem is bilinear, and the two are alternated until the value stops
    rising. `prices` are those of the last, similar problem of the root; the problem below them is solved from scratch.
    """
    if not profits:
        return node.identity(), 0.0
    below = {path[1:]: profit for path, profit in profits.items() if len(path) > 1}
    total = profits[node.name,] if (node.name,) in profits else np.zeros((node.size, node.size))
    if not below and node.group != "permutation":
        rotation = rotate(total, node.group)
        return {node.name: rotation}, float((total * rotation).sum())
    if not below:
        order = assign(total, prices)
        return node.identity() | {node.name: order}, value_of(total, order)
    rows = list(mapper(partial(_inner_problems, node, below), range(node.size)))
    total = total + np.array([[value for _, value in row] for row in rows])
    order = assign(total, prices)
    chosen = [rows[new][old][0] for new, old in enumerate(order)]
    inner = {name: np.stack([solution[name] for solution in chosen]) for name in chosen[0]}
    return {node.name: order} | inner, value_of(total, order)


def assign_all(
    problems: Sequence[tuple[Node, Profits]], workers: int | None = None, prices: Sequence[Prices] | None = None
) -> list[tuple[Permutations, float]]:
    """Solve independent problems in threads: the solver releases the GIL, and the result does not depend on the
    threads. `prices` holds, for each problem, those of the last similar one; they are brought up to date.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, or None for one per processor, got {workers}")
    workers = workers or os.cpu_count() or 1
    known = list(prices) if prices is not None else [Prices() for _ in problems]
    tasks = [(node, profits, own) for (node, profits), own in zip(problems, known, strict=True)]
    if workers == 1 or not problems or (len(problems) == 1 and not problems[0][0].children):
        return [assign_tree(node, profits, prices=own) for node, profits, own in tasks]
    with ThreadPoolExecutor(workers) as pool:
        if len(problems) == 1:
            return [assign_tree(*problems[0], pool.map, known[0])]
        return list(pool.map(lambda task: assign_tree(task[0], task[1], prices=task[2]), tasks))


def _inner_problems(node: Node, below: Profits, new: int) -> list[tuple[Permutations, float]]:
    """Solve the problems below one new position of `node` for every old unit."""
    return [
        _forest(node.children, {path: profit[new].take(old, axis=len(path)) for path, profit in below.items()})
        for old in range(node.size)
    ]


def _forest(nodes: Sequence[Node], profits: Profits) -> tuple[Permutations, float]:
    """Solve siblings below one pair of outer indices: independent, unless a path contains two of them."""
    solution: Permutations = {}
    value, alone = 0.0, 0
    for node in nodes:
        names = {below.name for below in node.walk()}
        own = {path: profit for path, profit in profits.items() if names.issuperset(path)}
        best, gain = assign_tree(node, own)
        solution |= best
        value += gain
        alone += len(own)
    return (solution, value) if alone == len(profits) else _alternate(nodes, profits, solution)


def _alternate(nodes: Sequence[Node], profits: Profits, solution: Permutations) -> tuple[Permutations, float]:
    """Alternate over leaves on common paths, one at a time with the others fixed, from the best of each alone."""
    if any(node.children for node in nodes):
        names = ", ".join(node.name for node in nodes)
        raise InputError(f"siblings that share an axis must have nothing nested inside them: {names}")
    best = _joint_value(profits, solution)
    while True:
        trial = dict(solution)
        for node in nodes:
            touching = [_contract(path, p, node.name, trial) for path, p in profits.items() if node.name in path]
            if touching:
                total = np.sum(touching, axis=0)
                trial[node.name] = assign(total) if node.group == "permutation" else rotate(total, node.group)
        value = _joint_value(profits, trial)
        if value <= best + 1e-12 * abs(best):
            return solution, best
        solution, best = trial, value


def _contract(path: Path, profit: Profit, keep: str | None, solution: Permutations) -> Profit:
    """Return a path's profit summed over the current permutation or rotation of every node except `keep`."""
    for position in reversed(range(len(path))):
        if path[position] != keep:
            place = solution[path[position]]
            moved = np.moveaxis(profit, (position, position + profit.ndim // 2), (0, 1))
            if place.ndim == 1:
                profit = moved[np.arange(place.size), place].sum(axis=0)
            else:
                profit = np.tensordot(place, moved, axes=2)
    return profit


def _joint_value(profits: Profits, solution: Permutations) -> float:
    return float(sum(_contract(path, profit, None, solution) for path, profit in profits.items()))
