"""The objective of a symmetry as a sum of terms: arrays whose leading axes are moved along paths of atoms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from merganser.align.blocks import Block, blocks, composite
from merganser.align.symmetries import Symmetry
from merganser.kernels.assignment import Node, Path, Permutations


@dataclass(frozen=True)
class Term:
    """The blocks moved along the same paths, joined along `rest`: one summand of the objective."""

    paths: tuple[Path, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class TermLayout:
    """The terms of a symmetry's objective."""

    symmetry: Symmetry
    terms: tuple[Term, ...]

    @classmethod
    def of(cls, symmetry: Symmetry) -> TermLayout:
        grouped: dict[tuple[Path, ...], list[Block]] = {}
        for name in symmetry.objective:
            for block in blocks(symmetry, name):
                if block.paths:
                    grouped.setdefault(block.paths, []).append(block)
        return cls(symmetry, tuple(Term(paths, tuple(own)) for paths, own in grouped.items()))

    @property
    def trees(self) -> Mapping[str, Node]:
        return self.symmetry.trees

    def weights(self, state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return the arrays (m₁, …, m_k, rest) of one model, one per term."""

        def real(array: Tensor) -> Tensor:
            # Re⟨a, b⟩ of complex weights is the inner product of their real and imaginary parts.
            return torch.view_as_real(array.resolve_conj()).flatten(-2) if array.is_complex() else array

        return [
            torch.cat([real(block.fold(state[block.name])).to(dtype) for block in term.blocks], dim=-1).contiguous()
            for term in self.terms
        ]

    @cached_property
    def paths(self) -> dict[str, tuple[Path, ...]]:
        """The paths of every tree that occur in some term."""
        used = dict.fromkeys(path for term in self.terms for path in term.paths)
        return {root: tuple(path for path in used if path[0] == root) for root in self.trees}

    @cached_property
    def places(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """The (term, axis) pairs that every tree moves."""
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

    def gathers(self, root: str, permutations: Permutations) -> dict[Path, Tensor]:
        """Return the gathers of every path of one tree."""
        return {path: torch.tensor(composite(self.symmetry, path, permutations)) for path in self.paths[root]}
