"""Permutation symmetries as data: which axis of which tensor moves with which permutation.

An axis is a concatenation of *segments*; a segment is an ordered product of *factors*; a factor is either pinned or
moved by an *atom*, one free permutation. A plain hidden layer is one segment of one factor. The rows of a value
projection are one segment (head, d_v); the rows of a fused QKV are three segments; the columns of a layer
after a concatenation have a segment for each of its inputs; a flatten after a convolution gives (channel, pinned).

An atom with a parent is nested (wreath product): every index of the parent has a permutation of its own, as the
units inside an attention head do. The parent stands beside it on the same axis (rows that are heads × units), or on
another axis of the same tensor (weights of shape experts × units × inputs).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product as cartesian
from typing import get_args

import numpy as np

from merganser.align.canonical_form import CanonicalForm
from merganser.align.segments import AxisSegment as AxisSegment
from merganser.align.segments import AxisSegments as AxisSegments
from merganser.align.segments import Factor as Factor
from merganser.align.segments import concatenation as concatenation
from merganser.align.segments import product as product
from merganser.align.segments import segment_from_json
from merganser.errors import InputError, did_you_mean
from merganser.excerpts import list_some
from merganser.kernels.assignment import Node, SymmetryGroup
from merganser.strict_json import parse_json

_BY_HAND = "a call of pin"


@dataclass(frozen=True, slots=True)
class Atom:
    """One free permutation of `size` units, or another `group` of maps; with a `parent`, one per index of the
    parent.
    """

    name: str
    size: int
    parent: str | None = None
    group: SymmetryGroup = "permutation"


@dataclass(frozen=True)
class Symmetry:
    """Atoms (units that are permuted together), and for every tensor the atoms on each of its axes.

    Attributes:
        atoms: The atoms by name.
        axes: For every tensor the atoms on each axis.
        buffers: Tensors that move with their axes but are not part of an objective (BatchNorm's running statistics).
        aliases: Tied tensors -> the first name of the same storage, which alone counts in an objective.
        causes: For each axis of a tensor what pins it, or parts of it; `why` says it in a sentence.
        canonical: The form that models are converted to before orthogonal maps act on them.

    Example:
        >>> symmetry = mg.align.symmetry(base, images)
        >>> sorted(symmetry.atoms)
        ['0', '2']
    """

    atoms: Mapping[str, Atom]
    axes: Mapping[str, tuple[AxisSegments, ...]]
    buffers: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    causes: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict, compare=False)
    canonical: CanonicalForm = field(default_factory=CanonicalForm)

    def __post_init__(self) -> None:
        for name, atom in self.atoms.items():
            if name != atom.name:
                raise InputError(f"atom {atom.name!r} is filed under {name!r}")
            if atom.parent is not None:
                self._known(atom.parent, f"the parent of atom {name!r}")
                if self.atoms[atom.parent].group != "permutation":
                    raise InputError(f"atom {name!r} is nested in {atom.parent!r}, whose units are rotated")
            self.ancestors(name)
        for name, axes in self.axes.items():
            for dim, axis in enumerate(axes):
                self._check_axis(axis, f"axis {dim} of {name!r}")
            if any(self.absent(segment) for axis in axes for segment in axis):
                self._check_nesting(name)

        for name, dim in self.canonical.places:
            if name not in self.axes or not 0 <= dim < len(self.axes[name]):
                raise InputError(f"the canonical form names axis {dim} of {name!r}, which the symmetry does not have")

    def _known(self, atom: str, where: str) -> None:
        if atom not in self.atoms:
            raise InputError(f"unknown atom {atom!r} in {where}{did_you_mean(atom, self.atoms)}")

    def _check_axis(self, axis: AxisSegments, where: str) -> None:
        for segment in axis:
            for factor in segment.factors:
                if factor.atom is None:
                    continue
                self._known(factor.atom, where)
                atom = self.atoms[factor.atom]
                if atom.size != factor.size:
                    raise InputError(f"{where}: factor of size {factor.size}, but atom {atom.name!r} has {atom.size}")
        covered = np.concatenate([segment.positions.reshape(-1) for segment in axis])
        if not np.array_equal(np.sort(covered), np.arange(covered.size)):
            raise InputError(f"{where}: its segments overlap or leave a gap")

    def _check_nesting(self, name: str) -> None:
        """Check that an atom has its ancestors beside it, or each of them exactly once on all axes together."""
        for segments in cartesian(*self.axes[name]):
            everywhere = Counter(atom for segment in segments for atom in segment.atoms)
            for dim, segment in enumerate(segments):
                for atom in self.absent(segment):
                    for ancestor in self.ancestors(atom):
                        if everywhere[ancestor] != 1:
                            raise InputError(
                                f"axis {dim} of {name!r}: nested atom {atom!r} needs its parent {ancestor!r} "
                                "beside it, or once on another axis"
                            )

    def absent(self, segment: AxisSegment) -> dict[str, frozenset[str]]:
        """Return the nested atoms of a segment that lack ancestors in it, with these ancestors."""
        here = set(segment.atoms)
        lacking = {atom: frozenset(self.ancestors(atom)) - here for atom in sorted(here)}
        return {atom: ancestors for atom, ancestors in lacking.items() if ancestors}

    def ancestors(self, name: str) -> tuple[str, ...]:
        """Return the chain of parents of an atom, outermost first."""
        chain: list[str] = []
        parent = self.atoms[name].parent
        while parent is not None:
            if parent in chain or parent == name:
                raise InputError(f"atom {name!r} is its own ancestor")
            chain.append(parent)
            parent = self.atoms[parent].parent
        return tuple(reversed(chain))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an atom's permutation array: sizes of its ancestors, then its own (twice for a
        matrix).
        """
        atom = self.atoms[name]
        own = (atom.size,) if atom.group == "permutation" else (atom.size, atom.size)
        return (*(self.atoms[a].size for a in self.ancestors(name)), *own)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(sum(segment.length for segment in axis) for axis in self.axes[name])

    @cached_property
    def objective(self) -> tuple[str, ...]:
        """The names that count in a matching objective: no buffers, tied tensors once, and something free."""
        return tuple(
            name for name in self.axes if name not in self.buffers and name not in self.aliases and self.free(name)
        )

    def free(self, name: str) -> frozenset[str]:
        """Return the atoms that act on tensor `name`."""
        return frozenset(atom for axis in self.axes[name] for segment in axis for atom in segment.atoms)

    @cached_property
    def trees(self) -> dict[str, Node]:
        """The free permutations as trees, by the name of their root; nested atoms are below their parent."""

        def tree(atom: Atom) -> Node:
            inside = tuple(tree(child) for child in self.atoms.values() if child.parent == atom.name)
            return Node(atom.name, atom.size, inside, atom.group)

        return {name: tree(atom) for name, atom in self.atoms.items() if atom.parent is None}

    @cached_property
    def rank(self) -> dict[str, int]:
        """The order of atoms along a path: tree by tree, parents first."""
        names = (node.name for tree in self.trees.values() for node in tree.walk())
        return {name: place for place, name in enumerate(names)}

    @cached_property
    def occurrences(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """The (tensor, axis) pairs that each atom acts on."""
        found: dict[str, list[tuple[str, int]]] = {name: [] for name in self.atoms}
        for name, axes in self.axes.items():
            for dim, axis in enumerate(axes):
                for atom in {atom for segment in axis for atom in segment.atoms}:
                    found[atom].append((name, dim))
        return {atom: tuple(pairs) for atom, pairs in found.items()}

    def why(self, name: str) -> str:
        """Explain for every axis of tensor `name` what it moves with, or what pins it.

        Args:
            name: A tensor of the module, as in its state dict.

        Returns:
            A line for the tensor and one per axis.

        Raises:
            InputError: If there is no such tensor.

        Example:
            >>> print(symmetry.why("encoder.embed.weight"))
            encoder.embed.weight
              axis 0 (40): pinned by the operation embedding at model.py:12
              axis 1 (32): moves with encoder.embed
        """
        if name not in self.axes:
            raise InputError(f"tensor {name!r} is not part of the symmetry{did_you_mean(name, self.axes)}")
        causes = self.causes.get(name) or ((),) * len(self.axes[name])
        lines = [name if self.axes[name] else f"{name}\n  has no axes"]
        for dim, (axis, own) in enumerate(zip(self.axes[name], causes, strict=True)):
            lines.append(f"  axis {dim} ({sum(s.length for s in axis)}): {_explain_axis(axis, own)}")
        return "\n".join(lines)

    def pin(self, *patterns: str) -> Symmetry:
        """Return a symmetry in which atoms that match a pattern, and everything nested in them, no longer move."""
        pinned = set(self._select(patterns))
        kept = {name for name in self.atoms if name not in pinned and not pinned & set(self.ancestors(name))}
        causes = dict(self.causes)
        for name, axes in self.axes.items():
            old = causes.get(name) or ((),) * len(axes)
            lost = [any(f.atom not in (None, *kept) for s in axis for f in s.factors) for axis in axes]
            causes[name] = tuple((*own, _BY_HAND) if now else own for own, now in zip(old, lost, strict=True))
        return replace(self._keep(kept), causes=causes)

    def _select(self, patterns: Sequence[str]) -> Iterator[str]:
        for pattern in patterns:
            found = [name for name in self.atoms if name == pattern or fnmatchcase(name, pattern)]
            if not found:
                raise InputError(f"no atom matches {pattern!r}{did_you_mean(pattern, self.atoms)}")
            yield from found

    def _keep(self, kept: set[str]) -> Symmetry:
        def segment(old: AxisSegment) -> AxisSegment:
            factors = tuple(f if f.atom in kept else replace(f, atom=None) for f in old.factors)
            return replace(old, factors=factors)

        atoms = {name: atom for name, atom in self.atoms.items() if name in kept}
        axes = {name: tuple(tuple(segment(s) for s in axis) for axis in axes) for name, axes in self.axes.items()}
        return replace(self, atoms=atoms, axes=axes)

    def extend(self, atoms: Iterable[Atom] = (), axes: Mapping[str, Sequence[AxisSegments]] | None = None) -> Symmetry:
        """Return a symmetry with more atoms, and with given axes of tensors, which replace the known ones."""
        more = {atom.name: atom for atom in atoms}
        given = {name: tuple(value) for name, value in (axes or {}).items()}
        causes = {name: own for name, own in self.causes.items() if name not in given}
        return replace(self, atoms={**self.atoms, **more}, axes={**self.axes, **given}, causes=causes)

    def to_json(self) -> str:
        def segment(s: AxisSegment) -> dict[str, object]:
            return {"factors": [[f.atom, f.size] for f in s.factors], "offset": s.offset, "strides": s.strides}

        return json.dumps(
            {
                "atoms": [[atom.name, atom.size, atom.parent, atom.group] for atom in self.atoms.values()],
                "axes": {name: [[segment(s) for s in a] for a in axes] for name, axes in self.axes.items()},
                "buffers": sorted(self.buffers),
                "aliases": dict(self.aliases),
                "causes": dict(self.causes),
                "canonical": asdict(self.canonical),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Symmetry:
        try:
            data = parse_json(text)
            atoms = {name: Atom(name, *more) for name, *more in data["atoms"]}
            if odd := {atom.group for atom in atoms.values()}.difference(get_args(SymmetryGroup)):
                raise ValueError(f"unknown group {min(odd)!r}")
            axes = {
                name: tuple(tuple(segment_from_json(s) for s in axis) for axis in axes)
                for name, axes in data["axes"].items()
            }
            buffers, aliases = frozenset(data["buffers"]), dict(data["aliases"])
            causes = {name: tuple(map(tuple, own)) for name, own in data.get("causes", {}).items()}
            canonical = CanonicalForm.from_json(data.get("canonical", {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"not the JSON of a symmetry: {error!r}") from error
        return cls(atoms, axes, buffers, aliases, causes, canonical)

    def __repr__(self) -> str:
        """Return what is in it; `print` shows the table."""
        return f"Symmetry({len(self.axes)} tensors; atoms {', '.join(self.atoms) or 'none'})"

    def __str__(self) -> str:
        """Return a table: atom, size, and the tensors (with axis) it acts on."""
        rows = [("atom", "size", "acts on")]
        for name, atom in self.atoms.items():
            size = " × ".join(str(self.atoms[a].size) for a in (*self.ancestors(name), name))
            size += "" if atom.group == "permutation" else f" {atom.group}"
            places = [f"{tensor}[{dim}]" for tensor, dim in self.occurrences[name]]
            shown = list_some(places, 6)
            rows.append(("  " * len(self.ancestors(name)) + name, size, shown))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {s:>{widths[1]}}  {acts}".rstrip() for a, s, acts in rows)


def _explain_axis(axis: AxisSegments, causes: Sequence[str]) -> str:
    """Return what an axis moves with, and what pins the rest of it."""
    atoms = dict.fromkeys(atom for segment in axis for atom in segment.atoms)
    pinned = any(f.atom is None and f.size > 1 for s in axis for f in s.factors)
    if not atoms and not pinned:
        return "has nothing to permute"
    moves = f"moves with {', '.join(atoms)}" if atoms else ""
    by = " and ".join(causes) or "what was said of this tensor by hand"
    return "; ".join(part for part in (moves, f"{'partly ' if atoms else ''}pinned by {by}" if pinned else "") if part)
