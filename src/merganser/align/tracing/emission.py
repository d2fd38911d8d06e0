"""From settled dims to a `Symmetry`: atoms get names, axes get segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from merganser.align.symmetries import Atom, Axis, Factor, Segment, Symmetry
from merganser.align.tracing.dims import Axes, Dim, leaves
from merganser.align.tracing.graph import Trace
from merganser.align.tracing.nesting import Piece, parents, pieces, settle


def emit(state: Mapping[str, Axes], trace: Trace, buffers: Iterable[str], aliases: Mapping[str, str]) -> Symmetry:
    """The symmetry of the tensors in `state` under everything the trace has learnt."""
    values: list[Sequence[Dim]] = [*trace.values, *([dim] for axes in state.values() for dim in axes)]
    settle(values, trace.forbidden)
    cut = {name: [list(pieces([dim])) for dim in axes] for name, axes in state.items()}
    homes: dict[Dim, str] = {}
    for name, axes in cut.items():
        for dim in (dim for axis in axes for piece in axis for dim in piece.dims if not dim.pinned):
            homes.setdefault(dim, name)
    above = parents(values, trace.forbidden, list(homes))
    names = _names(homes, above, trace.hints)
    atoms = {name: Atom(name, dim.size, names[above[dim]] if dim in above else None) for dim, name in names.items()}
    segments = {name: tuple(_axis(axis, names) for axis in axes) for name, axes in cut.items()}
    return Symmetry(atoms, segments, frozenset(buffers), aliases)


def _names(homes: Mapping[Dim, str], above: Mapping[Dim, Dim], hints: Sequence[tuple[Dim, str]]) -> dict[Dim, str]:
    """An atom is called after the module of the first tensor it acts on; `:part` tells several of one module apart."""
    labels: dict[Dim, str] = {}
    for dim, label in hints:
        for leaf in leaves(dim):
            labels.setdefault(leaf, label)
    modules = {dim: name.rpartition(".")[0] or name for dim, name in homes.items()}
    crowded = [module for module in modules.values() if list(modules.values()).count(module) > 1]
    names: dict[Dim, str] = {}
    for dim, module in modules.items():
        label = labels.get(dim) or (("inner" if dim in above else "outer") if module in crowded else "")
        name = f"{module}:{label}" if label else module
        taken = sum(other == name or other.startswith(f"{name}#") for other in names.values())
        names[dim] = f"{name}#{taken + 1}" if taken else name
    return names


def _axis(axis: Sequence[Piece], names: Mapping[Dim, str]) -> Axis:
    segments: list[Segment] = []
    for piece in sorted(axis, key=lambda piece: piece.offset):
        factors: list[Factor] = []
        strides: list[int] = []
        for dim, stride in zip(piece.dims, piece.strides, strict=True):
            size = dim.size
            if dim.pinned and factors and factors[-1].atom is None and strides[-1] == stride * size:
                size *= factors.pop().size
                strides.pop()
            factors.append(Factor(None if dim.pinned else names[dim], size))
            strides.append(stride)
        segments = _append(segments, Segment(tuple(factors), piece.offset, tuple(strides)))
    return tuple(segments)


def _append(segments: list[Segment], new: Segment) -> list[Segment]:
    """Add a segment; two neighbours that are wholly pinned become one."""
    if segments and _solid(segments[-1]) and _solid(new) and segments[-1].offset + segments[-1].length == new.offset:
        merged = Factor(None, segments[-1].length + new.length)
        return [*segments[:-1], replace(segments[-1], factors=(merged,), strides=(1,))]
    return [*segments, new]


def _solid(segment: Segment) -> bool:
    return segment.contiguous and all(factor.atom is None for factor in segment.factors)
