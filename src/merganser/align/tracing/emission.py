"""Convert settled dims to a `Symmetry`: name atoms, and build segments of axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from merganser.align.canonical_form import CanonicalForm
from merganser.align.symmetries import Atom, AxisSegment, AxisSegments, Factor, Symmetry, product
from merganser.align.tracing.dims import Axes, Dim, because, leaves, pin
from merganser.align.tracing.graph import Trace
from merganser.align.tracing.nesting import Strand, enumerate_pinned, parents, pieces, settle
from merganser.align.tracing.rotations import rotations


def emit(
    state: Mapping[str, Axes], trace: Trace, buffers: Iterable[str], aliases: Mapping[str, str], rotate: bool = False
) -> Symmetry:
    """Return the symmetry of the tensors in `state` from the trace; with `rotate`, including rotations."""
    values: list[Sequence[Dim]] = [*trace.values, *([dim] for axes in state.values() for dim in axes)]
    settle(values, trace.forbidden)
    _pin_squares(dim for axes in state.values() for dim in axes)
    enumerate_pinned(values, trace.forbidden)
    cut = {name: [list(pieces([dim])) for dim in axes] for name, axes in state.items()}
    homes: dict[Dim, str] = {}
    for name, axes in cut.items():
        for dim in (dim for axis in axes for piece in axis for dim in piece.dims if not dim.pinned):
            homes.setdefault(dim, name)
    above = parents(trace.values, trace.forbidden, list(state.values()), list(homes))
    names = _name_atoms(homes, above, trace.hints)
    turned = rotations(trace.uses, state, {*aliases, *aliases.values()}, above, list(homes)) if rotate else {}
    atoms = {
        name: Atom(
            name,
            dim.size,
            names[above[dim]] if dim in above else None,
            turned[dim].group if dim in turned else "permutation",
        )
        for dim, name in names.items()
    }
    segments = {name: tuple(_axis(axis, names) for axis in axes) for name, axes in cut.items()}
    causes = {name: tuple(_collect_causes(axis) for axis in axes) for name, axes in cut.items()}
    forms = [rotation.form for rotation in turned.values()]
    for norm in (norm for form in forms for norm in form.normalisations):  # constant in the canonical form
        for constant in (norm.scale, norm.shift):
            if constant is not None:
                segments[constant] = (product(Factor(None, state[constant][0].size)),)
                causes[constant] = (("the canonical form, where it is constant",),)
    canonical = CanonicalForm(
        tuple(norm for form in forms for norm in form.normalisations),
        tuple(written for form in forms for written in form.centred),
        tuple(pair for form in forms for pair in form.products),
    )
    return Symmetry(atoms, segments, frozenset(buffers), aliases, causes, canonical)


def _collect_causes(axis: Sequence[Strand]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(dim.pinned) for piece in axis for dim in piece.dims if dim.pinned))


def _pin_squares(axes: Iterable[Dim]) -> None:
    """Pin units that occur twice on one axis (a flattened outer product): their matching would not be linear."""
    with because("its place beside itself on one axis of a weight"):
        for piece in (piece for axis in axes for piece in pieces([axis])):
            pin(*(dim for dim, times in Counter(piece.dims).items() if times > 1))


def _name_atoms(homes: Mapping[Dim, str], above: Mapping[Dim, Dim], hints: Sequence[tuple[Dim, str]]) -> dict[Dim, str]:
    """Name an atom after the module of the first tensor it acts on; `:part` distinguishes several of one module."""
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


def _axis(axis: Sequence[Strand], names: Mapping[Dim, str]) -> AxisSegments:
    segments: list[AxisSegment] = []
    for piece in sorted(axis, key=lambda piece: piece.offset):
        factors = [Factor(None if dim.pinned else names[dim], dim.size) for dim in piece.dims] or [Factor(None, 1)]
        new = _join_factors(AxisSegment(tuple(factors), piece.offset, piece.strides or (1,)))
        joined = _join_tails(segments[-1], new) if segments else None
        segments[len(segments) - (joined is not None) :] = [joined or new]
    return tuple(segments)


def _join_factors(segment: AxisSegment) -> AxisSegment:
    """Join neighbouring pinned factors."""
    factors: list[Factor] = []
    strides: list[int] = []
    for factor, stride in zip(segment.factors, segment.strides, strict=True):
        size = factor.size
        if factors and factors[-1].atom is factor.atom is None and strides[-1] == stride * size:
            size *= factors.pop().size
            strides.pop()
        factors.append(replace(factor, size=size))
        strides.append(stride)
    return AxisSegment(tuple(factors), segment.offset, tuple(strides))


def _join_tails(a: AxisSegment, b: AxisSegment) -> AxisSegment | None:
    """Join two consecutive segments that differ only in the length of their innermost, pinned factors."""
    (*outer, tail), (*other, end) = a.factors, b.factors
    continues = a.strides == b.strides and a.offset + tail.size * a.strides[-1] == b.offset
    if outer != other or not continues or tail.atom is not None or end.atom is not None:
        return None
    return _join_factors(replace(a, factors=(*outer, Factor(None, tail.size + end.size))))
