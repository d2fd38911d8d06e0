"""From a symmetry to bare arithmetic: trees of permutations, and tensors whose leading axes those trees move.

Every tensor that counts is cut at its segments and folded into an array (m₁, …, m_k, rest) whose first k axes are each
moved by one path of one tree; arrays moved by the same paths are joined along `rest`. What follows never sees a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from merganser.align.permutations import Permutations, axis_index
from merganser.align.symmetries import Atom, AxisSegment, Block, Factor, Symmetry, product
from merganser.kernels.assignment import Index, Node, Path


@dataclass(frozen=True)
class FoldedBlock:
    """How one block of a tensor is folded: its factors as axes, the moved ones first, grouped by path."""

    block: Block
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def fold(self, tensor: Tensor) -> Tensor:
        folded = self.block.read(tensor).reshape(self.sizes).permute(self.order).reshape(self.shape)
        # Re⟨a, b⟩ of complex weights is the inner product of their real and imaginary parts.
        return torch.view_as_real(folded.resolve_conj()).flatten(-2) if folded.is_complex() else folded


@dataclass(frozen=True)
class Term:
    """The parts moved by the same paths: one summand of the objective."""

    paths: tuple[Path, ...]
    parts: tuple[FoldedBlock, ...]


@dataclass(frozen=True)
class TermLayout:
    """The trees to be permuted (by the name of their root) and the terms they move."""

    symmetry: Symmetry
    trees: Mapping[str, Node]
    terms: tuple[Term, ...]

    @classmethod
    def of(cls, symmetry: Symmetry) -> TermLayout:
        grouped: dict[tuple[Path, ...], list[FoldedBlock]] = {}
        depth_first = [node.name for tree in _trees(symmetry).values() for node in tree.walk()]
        rank = {name: position for position, name in enumerate(depth_first)}
        for name in symmetry.objective:
            for block in symmetry.blocks(name):
                if block.atoms:
                    paths, part = _fold(block, symmetry, rank)
                    grouped.setdefault(paths, []).append(part)
        return cls(symmetry, _trees(symmetry), tuple(Term(paths, tuple(parts)) for paths, parts in grouped.items()))

    def weights(self, state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The arrays (m₁, …, m_k, rest) of one model, one for each term."""
        return [
            torch.cat([part.fold(state[part.block.name]).to(dtype) for part in term.parts], dim=-1).contiguous()
            for term in self.terms
        ]

    @cached_property
    def paths(self) -> dict[str, tuple[Path, ...]]:
        """For every tree the paths that occur in some term."""
        used = dict.fromkeys(path for term in self.terms for path in term.paths)
        return {root: tuple(path for path in used if path[0] == root) for root in self.trees}

    @cached_property
    def places(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """For every tree the (term, axis) pairs it moves."""
        return {
            root: tuple(
                (position, axis)
                for position, term in enumerate(self.terms)
                for axis, path in enumerate(term.paths)
                if path[0] == root
            )
            for root in self.trees
        }

    def sizes(self, path: Path) -> tuple[int, ...]:
        return tuple(self.symmetry.atoms[name].size for name in path)

    def index(self, path: Path, permutations: Permutations) -> Index:
        """The permutations of a path as one gather of its composite axis: new[u] = old[index[u]]."""
        if len(path) == 1:
            return permutations[path[0]]
        axis = product(*(Factor(name, self.symmetry.atoms[name].size) for name in path))
        return axis_index(self.symmetry, axis, permutations)

    def indices(self, root: str, permutations: Permutations) -> dict[Path, Tensor]:
        """The gathers of every path of one tree."""
        return {path: torch.tensor(self.index(path, permutations)) for path in self.paths[root]}


def _trees(symmetry: Symmetry) -> dict[str, Node]:
    def tree(atom: Atom) -> Node:
        inside = tuple(tree(child) for child in symmetry.atoms.values() if child.parent == atom.name)
        return Node(atom.name, atom.size, inside)

    return {name: tree(atom) for name, atom in symmetry.atoms.items() if atom.parent is None}


def _fold(block: Block, symmetry: Symmetry, rank: Mapping[str, int]) -> tuple[tuple[Path, ...], FoldedBlock]:
    sizes = tuple(size for segment in block.segments for size in segment.sizes)
    moved: list[tuple[Path, list[int]]] = []
    start = 0
    for segment in block.segments:
        moved += _paths(segment, start, symmetry, rank)
        start += len(segment.factors)
    if any(symmetry.absent(segment) for segment in block.segments):
        moved = _joined(moved, symmetry, rank)
    leading = [axis for _, axes in moved for axis in axes]
    rest = [axis for axis in range(len(sizes)) if axis not in leading]
    shape = (*(prod(sizes[axis] for axis in axes) for _, axes in moved), prod(sizes[axis] for axis in rest))
    return tuple(path for path, _ in moved), FoldedBlock(block, sizes, (*leading, *rest), shape)


def _paths(
    segment: AxisSegment, start: int, symmetry: Symmetry, rank: Mapping[str, int]
) -> list[tuple[Path, list[int]]]:
    """The factors of one segment grouped by tree, each group in the order of its tree."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for axis, factor in enumerate(segment.factors, start):
        if factor.atom is not None:
            root = (*symmetry.ancestors(factor.atom), factor.atom)[0]
            groups.setdefault(root, []).append((factor.atom, axis))
    ordered = [sorted(group, key=lambda item: rank[item[0]]) for group in groups.values()]
    return [(tuple(name for name, _ in group), [axis for _, axis in group]) for group in ordered]


def _joined(
    moved: Sequence[tuple[Path, list[int]]], symmetry: Symmetry, rank: Mapping[str, int]
) -> list[tuple[Path, list[int]]]:
    """Groups of several axes made one where an atom of one has an ancestor in the other."""
    groups: list[list[tuple[str, int]]] = []
    for path, axes in moved:
        group = list(zip(path, axes, strict=True))
        for other in list(groups):
            if _lacks(group, other, symmetry) or _lacks(other, group, symmetry):
                groups.remove(other)
                group = other + group
        groups.append(group)
    ordered = [sorted(group, key=lambda item: rank[item[0]]) for group in groups]
    return [(tuple(name for name, _ in group), [axis for _, axis in group]) for group in ordered]


def _lacks(group: Sequence[tuple[str, int]], other: Sequence[tuple[str, int]], symmetry: Symmetry) -> bool:
    """Whether an atom of one group lacks an ancestor that is in the other."""
    here, there = {name for name, _ in group}, {name for name, _ in other}
    return any((set(symmetry.ancestors(name)) - here) & there for name in here)
