"""Refine the nodes of `dims`: unify axes, split them into products, cut them into concatenations, separate indices.

Knowledge only becomes more restrictive, so the order of operations does not matter for soundness. If two structures do
not fit together (4 × 3 against 3 × 4), both are pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from merganser.align.tracing.dims import (
    ENUMERABLE,
    ONE,
    Dim,
    Family,
    Product,
    Same,
    Sum,
    concat,
    factors,
    family,
    find,
    leaves,
    merge,
    parts,
    pin,
    select,
    sum_of,
)


def collapse(dim: Dim) -> None:
    """Give all indices of a family the same units."""
    if isinstance(dim.form, Family):
        first, *others = dim.form.members
        dim.form = Same(first)
        for other in others:
            unify(first, other)


def unify(a: Dim, b: Dim) -> None:
    """Make two dims of one size the same dim."""
    a, b = find(a), find(b)
    if a is b:
        return
    if a.size != b.size:
        raise ValueError(f"axes of sizes {a.size} and {b.size} cannot be the same")
    if b.form is None or (isinstance(a.form, Family | Sum) and not isinstance(b.form, Family)):
        a, b = b, a
    # From here: if one is bare it is a; if one is a family it is b; a sum comes after a product.
    if isinstance(b.form, Family):
        _unify_with_family(a, b, b.form)
    elif a.form is None:
        if a.pinned:
            pin(b, cause=a.pinned)
        a.form = Same(b)
    elif isinstance(a.form, Product) and isinstance(b.form, Product):
        _unify_products(a, b)
    else:
        _unify_sums(a, b)


def _unify_with_family(a: Dim, b: Dim, form: Family) -> None:
    same_index = isinstance(a.form, Family) and find(a.form.index) is find(form.index)
    if isinstance(a.form, Family) and same_index and not (_is_below(a, b) or _is_below(b, a)):
        members = a.form.members
        a.form = Same(b)
        for ours, theirs in zip(members, form.members, strict=True):
            unify(ours, theirs)
    elif isinstance(a.form, Product) and not _is_below(a, b):
        split(b, [factor.size for factor in factors(a)])
        unify(a, b)
    elif a.form is None and not _is_below(a, b):
        if a.pinned:
            pin(b, cause=a.pinned)
        a.form = Same(b)
    else:
        collapse(b)
        unify(a, b)


def _is_below(dim: Dim, top: Dim) -> bool:
    """Return whether `dim` is a member of the family `top`, at any depth of families."""
    if not isinstance(top.form, Family):
        return False
    return any(root is dim or _is_below(dim, root) for root in map(find, top.form.members))


def _unify_products(a: Dim, b: Dim) -> None:
    ours, theirs = factors(a), factors(b)
    while ours and theirs:
        x, y = ours.pop(0), theirs.pop(0)
        if x.size > y.size and x.size % y.size == 0:
            x, rest = split(x, (y.size, x.size // y.size))
            ours.insert(0, rest)
        elif y.size > x.size and y.size % x.size == 0:
            y, rest = split(y, (x.size, y.size // x.size))
            theirs.insert(0, rest)
        elif x.size != y.size:
            pin(a, b)
            return
        unify(x, y)
    _link(a, b)


def _unify_sums(a: Dim, b: Dim) -> None:
    while (ours := _ends(a)) != (theirs := _ends(b)):
        for dim, end in [*((b, end) for end in ours[:-1]), *((a, end) for end in theirs[:-1])]:
            cut(dim, end)
    for x, y in zip(parts(a), parts(b), strict=True):
        unify(x, y)
    _link(a, b)


def _ends(dim: Dim) -> list[int]:
    total, ends = 0, []
    for part in parts(dim):
        total += part.size
        ends.append(total)
    return ends


def _link(a: Dim, b: Dim) -> None:
    a, b = find(a), find(b)
    if a is not b:
        a.form = Same(b)


def split(dim: Dim, sizes: Sequence[int]) -> list[Dim]:
    """Return a dim as a product of the given sizes."""
    wanted = [size for size in sizes if size != 1]
    found = iter(_split(find(dim), wanted))
    return [next(found) if size != 1 else ONE for size in sizes]


def _split(dim: Dim, sizes: list[int]) -> list[Dim]:
    if len(sizes) <= 1:
        return [dim] if sizes else []
    if dim.form is None:
        bare = [Dim(size, dim.pinned) for size in sizes]
        dim.form = Product(tuple(bare))
        return bare
    if isinstance(dim.form, Family):
        index, members = dim.form.index, dim.form.members
        columns = zip(*(split(member, sizes) for member in members), strict=True)
        dim.form = Product(tuple(family(index, column) for column in columns))
        return list(dim.form.parts)
    found = _split_sum(dim, sizes) if isinstance(dim.form, Sum) else _split_product(dim, sizes)
    if found is None:
        pin(dim)
        return [Dim(size, pinned=True) for size in sizes]
    return found


def _split_product(dim: Dim, sizes: list[int]) -> list[Dim] | None:
    rest, found = factors(dim), []
    for size in sizes:
        taken: list[Dim] = []
        while size > 1:
            head = rest.pop(0)
            if head.size > size and head.size % size == 0:
                head, tail = split(head, (size, head.size // size))
                rest.insert(0, tail)
            elif size % head.size:
                return None
            taken.append(head)
            size //= head.size
        found.append(merge(taken))
    return found


def _split_sum(dim: Dim, sizes: list[int]) -> list[Dim] | None:
    assert isinstance(dim.form, Sum)
    outer, inner = sizes[0], dim.size // sizes[0]
    if len(dim.form.parts) != outer:
        dim.form = sum_of(parts(dim))
    if dim.form.index is not None and len(dim.form.parts) == outer:
        return [dim.form.index, *split(family(dim.form.index, dim.form.parts), sizes[1:])]
    if any(part.size % inner for part in parts(dim)):
        return None
    pairs = [split(part, (part.size // inner, inner)) for part in parts(dim)]
    for _, other in pairs[1:]:
        unify(pairs[0][1], other)
    return [concat([first for first, _ in pairs]), *split(pairs[0][1], sizes[1:])]


def cut(dim: Dim, at: int) -> tuple[Dim, Dim]:
    """Return a dim as its first `at` units and the rest."""
    dim = find(dim)
    if at in (0, dim.size):
        raise ValueError(f"nothing to cut at {at} of {dim.size}")
    if dim.form is None:
        left, right = Dim(at, dim.pinned), Dim(dim.size - at, dim.pinned)
        dim.form = sum_of((left, right))
        return left, right
    if isinstance(dim.form, Family):
        index = dim.form.index
        lefts, rights = zip(*(cut(member, at) for member in dim.form.members), strict=True)
        left, right = family(index, lefts), family(index, rights)
        dim.form = sum_of((left, right))
        return left, right
    if isinstance(dim.form, Product) and not _enumerate_outermost(dim, at):
        pin(dim)
        dim.form = sum_of((Dim(at, pinned=True), Dim(dim.size - at, pinned=True)))
    before: list[Dim] = []
    after = parts(dim)
    while at:
        if after[0].size > at:
            after[:1] = [p for half in cut(after[0], at) for p in parts(half)]
        at -= after[0].size
        before.append(after.pop(0))
    return concat(before), concat(after)


def _enumerate_outermost(dim: Dim, at: int) -> bool:
    """Turn a product into the concatenation over its outermost factor, if a cut at `at` needs no more than that."""
    outer, *inner = factors(dim)
    if outer.form is not None or outer.size > ENUMERABLE or at % (dim.size // outer.size):
        return False
    enumerate_index(outer, inner)
    rows = [merge(select(factor, outer, i) for factor in inner) for i in range(outer.size)]
    dim.form = Sum(tuple(rows), outer)
    return True


def narrow(dim: Dim, start: int, length: int) -> Dim:
    """Return the units start, …, start + length − 1 of a dim."""
    if start > 0:
        dim = cut(dim, start)[1]
    return cut(dim, length)[0] if length < dim.size else dim


def enumerate_index(index: Dim, others: Iterable[Dim]) -> None:
    """Pin `index`, whose indices are distinguished, and give every other axis its own units at each index.

    `nesting.settle` checks that this is sound for an axis (every tensor that has it has `index` too).
    """
    index = find(index)
    if index.form is None and not index.pinned and index.size <= ENUMERABLE:
        for dim in others:
            for leaf in list(leaves(dim)):
                if not leaf.pinned and leaf is not index:
                    leaf.form = Family(index, tuple(Dim(leaf.size) for _ in range(index.size)))
    pin(index)
