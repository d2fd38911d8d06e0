"""Convert tensors to arrays along the axes of a symmetry: the only place that handles segments and factors.

A tensor is split at its segments into blocks, each an array (m₁, …, m_k, rest) whose first k axes are each moved along
a path of atoms. All solvers work on such arrays, and never see a segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product as cartesian
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from merganser.align.segments import AxisSegment
from merganser.align.symmetries import Symmetry
from merganser.kernels.assignment import Path, Permutations
from merganser.kernels.linear_assignment import Index

#: Atoms of one tree, parents first, and the factors of a block that they move.
_Group = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Block:
    """The part of tensor `name` at one segment of each axis, as an array (m₁, …, m_k, rest).

    Axis i of the array is moved along `paths[i]`; `rest` is pinned. `order` lists the factors of all segments, the
    moved ones first, and `shape` is the array's.
    """

    name: str
    segments: tuple[AxisSegment, ...]
    paths: tuple[Path, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def fold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the block of a tensor as the array."""
        for dim, segment in enumerate(self.segments):
            if segment.contiguous:
                tensor = tensor.narrow(dim, segment.offset, segment.length)
            else:
                tensor = tensor.index_select(dim, segment.index.to(tensor.device))
        return tensor.reshape(self._sizes).permute(self.order).reshape(self.shape)

    def unfold(self, array: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write the array to its place in a tensor."""
        sizes = self._sizes
        back = sorted(range(len(sizes)), key=self.order.__getitem__)
        lengths = [segment.length for segment in self.segments]
        plain = array.reshape([sizes[axis] for axis in self.order]).permute(back).reshape(lengths)
        if all(segment.contiguous for segment in self.segments):
            for dim, segment in enumerate(self.segments):
                tensor = tensor.narrow(dim, segment.offset, segment.length)
            tensor.copy_(plain)
        else:
            places = [segment.index.to(tensor.device) for segment in self.segments]
            tensor[torch.meshgrid(*places, indexing="ij")] = plain

    @property
    def _sizes(self) -> list[int]:
        return [size for segment in self.segments for size in segment.sizes]


def blocks(symmetry: Symmetry, name: str) -> Iterator[Block]:
    """Split tensor `name` at its segments."""
    for segments in cartesian(*symmetry.axes[name]):
        groups: list[_Group] = []
        start = 0
        for segment in segments:
            groups += _group_factors(symmetry, segment, start)
            start += len(segment.factors)
        if any(symmetry.absent(segment) for segment in segments):
            groups = _join_groups(symmetry, groups)
        for group in groups:
            group.sort(key=lambda item: symmetry.rank[item[0]])
        sizes = [size for segment in segments for size in segment.sizes]
        moved = [axis for group in groups for _, axis in group]
        rest = [axis for axis in range(len(sizes)) if axis not in moved]
        shape = (*(prod(sizes[axis] for _, axis in group) for group in groups), prod(sizes[axis] for axis in rest))
        paths = tuple(tuple(atom for atom, _ in group) for group in groups)
        yield Block(name, segments, paths, (*moved, *rest), shape)


def _group_factors(symmetry: Symmetry, segment: AxisSegment, start: int) -> list[_Group]:
    """Return the moved factors of a segment, grouped by tree."""
    groups: dict[str, _Group] = {}
    for axis, factor in enumerate(segment.factors, start):
        if factor.atom is not None:
            groups.setdefault((*symmetry.ancestors(factor.atom), factor.atom)[0], []).append((factor.atom, axis))
    return list(groups.values())


def _join_groups(symmetry: Symmetry, groups: Sequence[_Group]) -> list[_Group]:
    """Join groups of several axes if an atom of one lacks an ancestor that is in the other."""

    def lacks(group: _Group, other: _Group) -> bool:
        here, there = {name for name, _ in group}, {name for name, _ in other}
        return any((set(symmetry.ancestors(name)) - here) & there for name in here)

    joined: list[_Group] = []
    for group in groups:
        for other in list(joined):
            if lacks(group, other) or lacks(other, group):
                joined.remove(other)
                group = other + group
        joined.append(group)
    return joined


def composite(symmetry: Symmetry, path: Path, permutations: Permutations) -> NDArray[Any]:
    """Return permutations along a path as one gather of its composite axis, new[u] = old[gather[u]].

    If the innermost units are rotated, it is a matrix, new = matrix @ old.
    """
    if len(path) == 1:
        return permutations[path[0]]
    *outer, last = path
    if symmetry.atoms[last].group != "permutation":
        order = composite(symmetry, tuple(outer), permutations)
        places = np.unravel_index(np.arange(order.size), [symmetry.atoms[atom].size for atom in outer])
        rotations = permutations[last][tuple(places[outer.index(a)] for a in symmetry.ancestors(last))]
        size = symmetry.atoms[last].size
        matrix = np.zeros((order.size, size, order.size, size))
        matrix[np.arange(order.size), :, order, :] = rotations
        return matrix.reshape(order.size * size, -1)
    sizes = [symmetry.atoms[atom].size for atom in path]
    new = dict(zip(path, np.indices(sizes, dtype=np.int64), strict=True))
    lines = {atom: (*symmetry.ancestors(atom), atom) for atom in path}
    old = [permutations[atom][tuple(new[a] for a in line)] for atom, line in lines.items()]
    index: Index = np.ravel_multi_index(old, sizes).reshape(-1)
    return index


def move(array: torch.Tensor, axis: int, index: torch.Tensor) -> torch.Tensor:
    """Move one axis of an array by a gather (m,) or mix it by a matrix (m, m): rows new, columns old."""
    if index.dim() == 1:
        return array.index_select(axis, index.to(array.device))
    wide = array.to(torch.promote_types(array.dtype, torch.float32))
    mixed: torch.Tensor = torch.tensordot(wide, index.to(wide), dims=([axis], [1]))
    return mixed.movedim(-1, axis).contiguous()
