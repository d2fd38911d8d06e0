"""Axes as nodes of a union-find that also knows structure.

A `Dim` is what is known about an axis: at first a bare set of `size` interchangeable units. It may turn out to be

- the same as another axis (`Same`, the union-find);
- a product of smaller ones (`Product`: heads × head-dim, channels × pixels);
- a concatenation (`Sum`: fused QKV, DenseNet);
- one with other units at every index of a third axis (`Family`: q, k and v stacked along an axis of three);
- pinned: its units cannot move.

This module has the nodes and functions to read them; `unification` refines them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod

ENUMERABLE = 64
"""Longest axis whose indices get units of their own when one of them is selected."""


@dataclass(frozen=True, slots=True)
class Same:
    target: Dim


@dataclass(frozen=True, slots=True)
class Product:
    parts: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    parts: tuple[Dim, ...]
    index: Dim | None
    """The axis that counts the parts, when they are equally long."""


@dataclass(frozen=True, slots=True)
class Family:
    """At index i of axis `index`, the units are those of `members[i]`."""

    index: Dim
    members: tuple[Dim, ...]


@dataclass(eq=False, slots=True)
class Dim:
    """A node of the union-find; bare (a future atom) while `form` is None. Compare nodes by `find`."""

    size: int
    pinned: bool | str = False
    """False, or what pins it, in words."""
    form: Same | Product | Sum | Family | None = None

    def __post_init__(self) -> None:
        self.pinned = self.pinned and (_cause.get() if self.pinned is True else self.pinned)


_cause = ContextVar("cause", default="the code of the module")


@contextmanager
def because(cause: str) -> Iterator[None]:
    """Give `cause` as the reason for everything that is pinned inside this context."""
    token = _cause.set(cause)
    try:
        yield
    finally:
        _cause.reset(token)


ONE = Dim(1, pinned=True)


class Axes(tuple[Dim, ...]):
    """The axes of one traced tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self)


class Positions(Axes):
    """The axes of an integer tensor whose values the program fixes: positions on an axis, as in x[:, [-1]]."""

    value: tuple[int, ...]

    @classmethod
    def of(cls, axes: Axes, value: Iterable[int]) -> Positions:
        found = cls(axes)
        found.value = tuple(value)
        return found

    def run(self, size: int) -> range | None:
        """Return the positions on an axis of some size, if they are contiguous and in order."""
        found = [position % size for position in self.value]
        run = range(found[0], found[0] + len(found)) if found else range(0)
        return run if found and found == list(run) else None


def fresh(shape: Iterable[int], *, pinned: bool = False) -> Axes:
    return Axes(Dim(size, pinned) if size != 1 else ONE for size in shape)


def find(dim: Dim) -> Dim:
    """Return the representative of a dim."""
    while isinstance(dim.form, Same):
        if isinstance(dim.form.target.form, Same):
            dim.form = dim.form.target.form
        dim = dim.form.target
    if isinstance(dim.form, Family):
        roots = {id(root): root for root in map(find, dim.form.members)}
        if len(roots) == 1:
            dim.form = Same(next(iter(roots.values())))
            return find(dim)
    return dim


def factors(dim: Dim) -> list[Dim]:
    """Return a dim as an ordered product, outermost first; no factor is itself a product or of size 1."""
    dim = find(dim)
    if isinstance(dim.form, Product):
        return [factor for part in dim.form.parts for factor in factors(part)]
    return [dim] if dim.size != 1 else []


def parts(dim: Dim) -> list[Dim]:
    """Return a dim as a concatenation; no part is itself a concatenation."""
    dim = find(dim)
    return [p for part in dim.form.parts for p in parts(part)] if isinstance(dim.form, Sum) else [dim]


def leaves(dim: Dim) -> Iterator[Dim]:
    """Yield every bare dim below."""
    dim = find(dim)
    if dim.form is None:
        yield dim
    elif not isinstance(dim.form, Same):
        for child in dim.form.members if isinstance(dim.form, Family) else dim.form.parts:
            yield from leaves(child)


def is_pinned(dim: Dim) -> bool:
    return all(leaf.pinned for leaf in leaves(dim))


def pin(*dims: Dim, cause: bool | str = True) -> None:
    """Pin dims; `cause` is the reason, by default that of the surrounding `because`."""
    for dim in dims:
        for leaf in leaves(dim):
            leaf.pinned = leaf.pinned or (_cause.get() if cause is True else cause)


def merge(dims: Iterable[Dim]) -> Dim:
    """Return the product of dims, outermost first."""
    found = [dim for dim in dims if dim.size != 1]
    if len(found) <= 1:
        return found[0] if found else ONE
    return Dim(prod(dim.size for dim in found), form=Product(tuple(found)))


def concat(dims: Sequence[Dim]) -> Dim:
    """Return the concatenation of dims."""
    if len(dims) == 1:
        return dims[0]
    return Dim(sum(dim.size for dim in dims), form=sum_of(dims))


def sum_of(dims: Sequence[Dim]) -> Sum:
    equal = len({dim.size for dim in dims}) == 1
    return Sum(tuple(dims), Dim(len(dims), pinned=True) if equal else None)


def family(index: Dim, members: Sequence[Dim]) -> Dim:
    """Return the dim that is `members[i]` at index i of `index`."""
    return find(Dim(members[0].size, form=Family(index, tuple(members))))


def select(dim: Dim, index: Dim, i: int) -> Dim:
    """Return a dim at index i of the axis `index`."""
    dim, index = find(dim), find(index)
    if isinstance(dim.form, Family):
        if find(dim.form.index) is index:
            return find(dim.form.members[i])
        return family(dim.form.index, [select(member, index, i) for member in dim.form.members])
    if isinstance(dim.form, Product | Sum):
        old = [find(part) for part in dim.form.parts]
        new = [select(part, index, i) for part in old]
        if all(a is b for a, b in zip(old, new, strict=True)):
            return dim
        return merge(new) if isinstance(dim.form, Product) else concat(new)
    return dim
