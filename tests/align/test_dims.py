"""The union-find of axes: structure is refined, never lost; what does not fit is pinned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from merganser.align.tracing.dims import Dim, concat, factors, family, find, is_pinned, merge, parts, pin, select
from merganser.align.tracing.unification import cut, enumerate_index, narrow, split, unify


def sizes(dims: list[Dim]) -> list[int]:
    return [dim.size for dim in dims]


def test_products_refine_each_other() -> None:
    a, b = Dim(24), Dim(24)
    split(a, (4, 6))
    split(b, (2, 12))
    unify(a, b)
    assert sizes(factors(a)) == [2, 2, 6]
    assert all(x is y for x, y in zip(factors(a), factors(b), strict=True))


def test_products_that_do_not_fit_are_pinned() -> None:
    a, b = Dim(12), Dim(12)
    split(a, (4, 3))
    split(b, (3, 4))
    unify(a, b)
    assert is_pinned(a)
    assert is_pinned(b)


def test_pins_spread() -> None:
    a, b, c = Dim(6), Dim(6), Dim(6)
    unify(a, b)
    split(c, (2, 3))
    pin(a)
    unify(b, c)
    assert is_pinned(c)


def test_sums_are_cut_at_all_boundaries() -> None:
    a, b = concat([Dim(3), Dim(5)]), concat([Dim(6), Dim(2)])
    unify(a, b)
    assert sizes(parts(a)) == sizes(parts(b)) == [3, 3, 2]
    assert all(x is y for x, y in zip(parts(a), parts(b), strict=True))


def test_slices_of_a_concatenation_are_its_parts() -> None:
    a, b = Dim(3), Dim(5)
    joined = concat([a, b])
    assert narrow(joined, 3, 5) is b
    assert find(narrow(joined, 0, 3)) is a


def test_equal_parts_stacked_make_a_family() -> None:
    q, k, v = (Dim(8) for _ in range(3))
    index, head, inner = split(concat([q, k, v]), (3, 2, 4))
    assert index.pinned
    for i, whole in enumerate((q, k, v)):
        assert factors(whole) == [select(head, index, i), select(inner, index, i)]


def test_a_product_meets_a_concatenation() -> None:
    fused, (q, kv) = Dim(12), (Dim(4), Dim(8))
    split(fused, (3, 4))
    unify(fused, concat([q, kv]))
    assert sizes(parts(fused)) == [4, 4, 4]
    assert parts(fused)[0] is find(q)
    assert not is_pinned(q)


def test_a_family_of_one_member_is_that_member() -> None:
    index, member = Dim(3, pinned=True), Dim(4)
    assert family(index, [member] * 3) is member


def test_a_member_unified_with_its_family_collapses_it() -> None:
    index, members = Dim(2, pinned=True), [Dim(4), Dim(4)]
    whole = family(index, members)
    unify(members[0], whole)
    assert find(members[0]) is find(members[1]) is find(whole)


def test_enumeration_leaves_pinned_axes_alone() -> None:
    index, free, fixed = Dim(3), Dim(4), Dim(5, pinned=True)
    enumerate_index(index, [free, fixed])
    assert find(index).pinned
    assert select(fixed, index, 0) is fixed
    assert select(free, index, 0) is not select(free, index, 1)


@st.composite
def structured(draw: st.DrawFn, size: int) -> Dim:
    """A random structure over `size` units."""
    kind = draw(st.sampled_from(["bare", "product", "sum", "pinned"]))
    divisors = [d for d in range(2, size) if size % d == 0]
    if kind == "product" and divisors:
        outer = draw(st.sampled_from(divisors))
        return merge([draw(structured(outer)), draw(structured(size // outer))])
    if kind == "sum" and size > 2:
        at = draw(st.integers(1, size - 1))
        return concat([draw(structured(at)), draw(structured(size - at))])
    return Dim(size, pinned=kind == "pinned")


@given(st.data(), st.sampled_from([6, 8, 12, 24]))
def test_unify_always_ends_with_one_structure_or_pinned(data: st.DataObject, size: int) -> None:
    a, b, c = (data.draw(structured(size)) for _ in range(3))
    unify(a, b)
    unify(b, c)
    unify(a, c)
    for dim in (a, b, c):
        assert sum(sizes(parts(dim))) == size
    if not is_pinned(a):
        assert find(a) is find(b) is find(c)


@given(st.data(), st.sampled_from([6, 12, 24]))
def test_cut_and_split_keep_sizes(data: st.DataObject, size: int) -> None:
    dim = data.draw(structured(size))
    at = data.draw(st.integers(1, size - 1))
    assert [d.size for d in cut(dim, at)] == [at, size - at]
    outer = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    assert [d.size for d in split(dim, (outer, size // outer))] == [outer, size // outer]
