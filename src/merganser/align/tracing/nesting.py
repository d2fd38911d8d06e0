"""Decide which atoms may be nested in which, and which families must collapse.

The units of an axis d may be permuted differently at every index of an axis h (a head, or q/k/v in a fused
projection) iff the index is always at hand and never mixed away:

- every traced tensor that has d has h, exactly once; a weight has it beside d on the same axis, or exactly once;
- no operation combines entries of different h while it keeps d apart (`Forbidden`, said by the operation's rule).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as cartesian
from math import prod

from merganser.align.tracing.dims import ENUMERABLE, Dim, Family, Product, Sum, factors, find, leaves, parts, select
from merganser.align.tracing.unification import collapse


@dataclass(frozen=True, slots=True)
class Forbidden:
    """Units of `child` must not depend on the index of `parent`."""

    parent: Dim
    child: Dim


@dataclass(frozen=True, slots=True)
class Strand:
    """One path through the concatenations and families of some axes: bare dims with their strides."""

    offset: int
    dims: tuple[Dim, ...]
    strides: tuple[int, ...]


#: Maximum units nested across axes: matching them needs a square matrix of this side, at most 2 GB.
LARGEST_FAMILY = 1 << 14
#: The bare dims of a part of a weight, axis by axis.
_Block = tuple[tuple[Dim, ...], ...]


class _Orphan(Exception):
    def __init__(self, dim: Dim) -> None:
        self.dim = dim


def pieces(axes: Iterable[Dim]) -> Iterator[Strand]:
    """Yield all pieces of some axes (for one axis, its segments)."""
    return _expand([(axis, 1) for axis in axes], 0)


def _expand(items: Sequence[tuple[Dim, int]], offset: int) -> Iterator[Strand]:
    flat: list[tuple[Dim, int]] = []
    for dim, stride in items:
        inner = find(dim).size
        for factor in factors(dim):
            inner //= factor.size or 1  # an axis without units has a place all the same
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
    yield Strand(offset, tuple(dim for dim, _ in flat), tuple(stride for _, stride in flat))


def settle(values: Sequence[Sequence[Dim]], forbidden: Sequence[Forbidden]) -> None:
    """Collapse every family whose index some tensor lacks or some operation mixes, until none is left."""
    changed = True
    while changed:
        changed = False
        for broken in (*(_mix_index(rule) for rule in forbidden), *(_drop_index(axes) for axes in values)):
            if broken is not None:
                collapse(broken)
                changed = True


def _mix_index(rule: Forbidden) -> Dim | None:
    """Return a family of the child whose index is in the parent."""
    indices = set(leaves(rule.parent))
    return next((dim for dim, index in families(rule.child) if index in indices), None)


def families(dim: Dim) -> Iterator[tuple[Dim, Dim]]:
    """Yield every family below, with its index."""
    dim = find(dim)
    below: tuple[Dim, ...] = ()
    if isinstance(dim.form, Family):
        yield dim, find(dim.form.index)
        below = dim.form.members
    elif isinstance(dim.form, Product | Sum):
        below = dim.form.parts
    for child in below:
        yield from families(child)


def _drop_index(axes: Sequence[Dim]) -> Dim | None:
    """Return a family without its index among the axes of a tensor."""
    try:
        for _ in pieces(axes):
            pass
    except _Orphan as orphan:
        return orphan.dim
    return None


def companions(values: Sequence[Sequence[Dim]], forbidden: Sequence[Forbidden]) -> dict[Dim, list[Dim]]:
    """Return for every free bare dim the bare dims whose index its units may depend on."""
    found: dict[Dim, list[Dim]] = {}
    for axes in values:
        for piece in pieces(axes):
            once = [dim for dim, times in Counter(piece.dims).items() if times == 1]
            for dim in {dim: None for dim in piece.dims if not dim.pinned}:
                found[dim] = [other for other in found.get(dim, once) if other in once and other is not dim]
    for rule in forbidden:
        outer = set(leaves(rule.parent))
        for leaf in leaves(rule.child):
            if leaf in found:
                found[leaf] = [other for other in found[leaf] if other not in outer]
    return found


def enumerate_pinned(values: Sequence[Sequence[Dim]], forbidden: Sequence[Forbidden]) -> None:
    """Give dims their own units at each index of a pinned index (heads with their own slope) that they may depend
    on.
    """
    while True:
        pairs = [
            (dim, index)
            for dim, others in companions(values, forbidden).items()
            for index in others
            if index.pinned and index.size <= ENUMERABLE
        ]
        if not pairs:
            return
        for dim, index in dict(pairs).items():
            dim.form = Family(index, tuple(Dim(dim.size) for _ in range(index.size)))


def parents(
    values: Sequence[Sequence[Dim]],
    forbidden: Sequence[Forbidden],
    weights: Sequence[Sequence[Dim]],
    order: Sequence[Dim],
) -> dict[Dim, Dim]:
    """Return the parent of every atom that has one. `order` lists the atoms, outer ones before inner ones.

    Of several possible parents the innermost is chosen, if the atom may depend on all of that parent's ancestors too.
    Parents on the same axis of all weights come first, then those across axes for atoms without a family.
    """
    alone = companions([[axis] for axes in weights for axis in axes], forbidden)
    possible = {**alone, **companions(values, forbidden)}
    homes: dict[Dim, list[_Block]] = {}
    for block in dict.fromkeys(block for axes in weights for block in _split_blocks(axes)):
        for dim in {dim for axis in block for dim in axis}:
            homes.setdefault(dim, []).append(block)
    chain: dict[Dim, list[Dim]] = {}
    above: set[Dim] = set()
    for fits in (_fits_beside, _fits_across):
        for place, dim in enumerate(order):
            if dim in above or chain.get(dim):
                continue
            candidates = [[*chain[other], other] for other in order[:place] if other in possible[dim]]
            fitting = [
                c
                for c in candidates
                if all(other in possible[dim] for other in c) and all(fits(b, dim, c, chain) for b in homes[dim])
            ]
            chain[dim] = max(fitting, key=len, default=[])
            above.update(chain[dim])
    return {dim: chain[dim][-1] for dim in order if chain[dim]}


def _split_blocks(axes: Sequence[Dim]) -> Iterator[_Block]:
    """Yield the blocks of a weight, split at the pieces of each of its axes."""
    return cartesian(*([piece.dims for piece in pieces([axis])] for axis in axes))


def _fits_beside(block: _Block, dim: Dim, ancestors: Sequence[Dim], chain: Mapping[Dim, Sequence[Dim]]) -> bool:
    """Return whether the ancestors of `dim` are beside it in a block of a weight."""
    return all(axis.count(ancestor) == 1 for axis in block if dim in axis for ancestor in ancestors)


def _fits_across(block: _Block, dim: Dim, ancestors: Sequence[Dim], chain: Mapping[Dim, Sequence[Dim]]) -> bool:
    """Return whether a block of a weight determines which indices the units of `dim` depend on.

    Its ancestors are beside it, or they and it once on all axes together. Across axes there is only one line of
    descent: two nested atoms that are not nested in each other would need a joint assignment of all their pairs.
    """
    if dim.size * prod(ancestor.size for ancestor in ancestors) > LARGEST_FAMILY:
        return False
    chosen = {**chain, dim: ancestors}
    family = [other for axis in block for other in axis if chosen.get(other) and chosen[other][0] is ancestors[0]]
    across = [d for d in family if any(d in axis and not set(chosen[d]) <= set(axis) for axis in block)]
    if not across:
        return True
    everywhere = Counter(other for axis in block for other in axis)
    line = max((chosen[d] for d in family), key=len)
    return all(everywhere[a] == 1 for d in across for a in (*chosen[d], d)) and all(
        d in line or chosen[d] is line for d in family
    )
