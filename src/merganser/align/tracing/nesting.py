"""Which atoms may be nested in which, and which families must collapse.

The units of an axis d may be permuted differently at every index of an axis h (a head, or q/k/v in a fused
projection) iff the index is always at hand and never mixed away:

- every traced tensor that has d has h, exactly once; for weights, on the same axis;
- no operation combines entries of different h while it keeps d apart (`Forbidden`, said by the operation's rule).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from merganser.align.tracing.dims import Dim, Family, Sum, collapse, factors, find, leaves, parts, select


@dataclass(frozen=True, slots=True)
class Forbidden:
    """Units of `child` may not depend on the index of `parent`."""

    parent: Dim
    child: Dim


@dataclass(frozen=True, slots=True)
class Piece:
    """One way through the concatenations and families of some axes: bare dims with their strides."""

    offset: int
    dims: tuple[Dim, ...]
    strides: tuple[int, ...]


class _Orphan(Exception):
    def __init__(self, dim: Dim) -> None:
        self.dim = dim


def pieces(axes: Iterable[Dim]) -> Iterator[Piece]:
    """All pieces of some axes (of one axis: its segments)."""
    return _expand([(axis, 1) for axis in axes], 0)


def _expand(items: Sequence[tuple[Dim, int]], offset: int) -> Iterator[Piece]:
    flat: list[tuple[Dim, int]] = []
    for dim, stride in items:
        inner = find(dim).size
        for factor in factors(dim):
            inner //= factor.size
            flat.append((factor, stride * inner))
    for place, (dim, stride) in enumerate(flat):
        if isinstance(dim.form, Sum):
            start = offset
            for part in parts(dim):
                yield from _expand([*flat[:place], (part, stride), *flat[place + 1 :]], start)
                start += stride * part.size
            return
    for dim, _ in flat:
        if isinstance(dim.form, Family):
            index = find(dim.form.index)
            found = [stride for other, stride in flat if other is index]
            if len(found) != 1:
                raise _Orphan(dim)
            for i in range(index.size):
                chosen = [(select(d, index, i), s) for d, s in flat if d is not index]
                yield from _expand(chosen, offset + i * found[0])
            return
    yield Piece(offset, tuple(dim for dim, _ in flat), tuple(stride for _, stride in flat))


def settle(values: Sequence[Sequence[Dim]], forbidden: Sequence[Forbidden]) -> None:
    """Collapse every family whose index some tensor lacks or some operation mixes, until none is left."""
    changed = True
    while changed:
        changed = False
        for rule in forbidden:
            indices = {id(leaf) for leaf in leaves(rule.parent)}
            while mixed := next((f for f in _families(rule.child) if id(find(_index(f))) in indices), None):
                collapse(mixed)
                changed = True
        for axes in values:
            while True:
                try:
                    for _ in pieces(axes):
                        pass
                    break
                except _Orphan as orphan:
                    collapse(orphan.dim)
                    changed = True


def _families(dim: Dim) -> Iterator[Dim]:
    dim = find(dim)
    if isinstance(dim.form, Family):
        yield dim
        for member in dim.form.members:
            yield from _families(member)
    elif dim.form is not None and hasattr(dim.form, "parts"):
        for part in dim.form.parts:
            yield from _families(part)


def _index(dim: Dim) -> Dim:
    assert isinstance(dim.form, Family)
    return dim.form.index


def parents(values: Sequence[Sequence[Dim]], forbidden: Sequence[Forbidden], order: Sequence[Dim]) -> dict[Dim, Dim]:
    """The parent of every atom that has one. `order` lists the atoms, outer ones before inner ones.

    Of several possible parents the innermost is taken, if the atom may depend on all of that parent's ancestors too.
    """
    possible: dict[int, set[int]] = {}
    for axes in values:
        for piece in pieces(axes):
            free = [id(dim) for dim in piece.dims if not dim.pinned]
            once = {key for key in free if free.count(key) == 1}
            for key in set(free):
                here = once - {key}
                possible[key] = possible[key] & here if key in possible else here
    for rule in forbidden:
        outer = {id(leaf) for leaf in leaves(rule.parent)}
        for leaf in leaves(rule.child):
            if id(leaf) in possible:
                possible[id(leaf)] -= outer
    chain: dict[int, list[Dim]] = {}
    for dim in order:
        candidates = [
            [*chain[id(other)], other] for other in order if id(other) in chain and id(other) in possible[id(dim)]
        ]
        allowed = [c for c in candidates if all(id(ancestor) in possible[id(dim)] for ancestor in c)]
        chain[id(dim)] = max(allowed, key=len, default=[])
    return {dim: chain[id(dim)][-1] for dim in order if chain[id(dim)]}
