from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.errors import InputError
from merganser.kernels.assignment import Node, assign_all, assign_tree, rotate
from merganser.kernels.linear_assignment import assign

HEADS = Node("head", 3, (Node("qk", 3), Node("vo", 2)))


def permutations(size):
    return [np.array(p) for p in itertools.permutations(range(size))]


def brute_force(node, profits):
    """Every member of the wreath product of a root and its leaves, valued through flat composite indices."""
    best = -np.inf
    for outer in permutations(node.size):
        choices = [itertools.product(permutations(leaf.size), repeat=node.size) for leaf in node.children]
        for inner in itertools.product(*choices):
            solution = {node.name: outer} | {
                leaf.name: np.stack(i) for leaf, i in zip(node.children, inner, strict=True)
            }
            best = max(best, value(node, profits, solution))
    return best


def value(node, profits, solution):
    sizes = {below.name: below.size for below in node.walk()}
    total = 0.0
    for path, profit in profits.items():
        for place in np.ndindex(*[sizes[name] for name in path]):
            unit = [solution[path[0]][place[0]]]
            unit += [solution[n][place[0], i] for n, i in zip(path[1:], place[1:], strict=True)]
            total += profit[(*place, *unit)]
    return total


def random_profits(rng, node, paths):
    sizes = {below.name: below.size for below in node.walk()}
    return {path: rng.standard_normal([sizes[name] for name in path] * 2) for path in paths}


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_assign_equals_brute_force(size, seed):
    profit = np.random.default_rng(seed).standard_normal((size, size))
    order = assign(profit)
    best = max(profit[np.arange(size), p].sum() for p in permutations(size))
    assert profit[np.arange(size), order].sum() == pytest.approx(best)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_two_inner_problems_under_one_outer_are_exact(seed):
    rng = np.random.default_rng(seed)
    node = Node("head", 2, (Node("qk", 3), Node("vo", 2)))
    profits = random_profits(rng, node, [("head",), ("head", "qk"), ("head", "vo")])
    solution, reached = assign_tree(node, profits)
    assert reached == pytest.approx(value(node, profits, solution))
    assert reached == pytest.approx(brute_force(node, profits))


def test_three_levels_agree_with_the_flat_composite():
    rng = np.random.default_rng(0)
    node = Node("a", 2, (Node("b", 2, (Node("c", 3),)),))
    profit = rng.standard_normal((2, 2, 3, 2, 2, 3))
    solution, reached = assign_tree(node, {("a", "b", "c"): profit})
    assert [solution[n].shape for n in "abc"] == [(2,), (2, 2), (2, 2, 3)]
    best = -np.inf
    for a in permutations(2):
        for b in itertools.product(permutations(2), repeat=2):
            for c in itertools.product(permutations(3), repeat=4):
                best = max(
                    best,
                    sum(
                        profit[i, j, k, a[i], b[i][j], c[2 * i + j][k]]
                        for i, j, k in itertools.product(range(2), range(2), range(3))
                    ),
                )
    assert reached == pytest.approx(best)


def test_siblings_on_one_path_recover_a_planted_solution():
    """Grouped-query attention: query heads and value dimensions are both inside one key-value head."""
    rng = np.random.default_rng(1)
    node = Node("kv", 3, (Node("group", 4), Node("dim", 5)))
    planted = {
        "kv": rng.permutation(3),
        "group": np.stack([rng.permutation(4) for _ in range(3)]),
        "dim": np.stack([rng.permutation(5) for _ in range(3)]),
    }
    weights = rng.standard_normal((3, 4, 5, 64))
    dims = rng.standard_normal((3, 5, 64))
    moved, moved_dims = np.empty_like(weights), np.empty_like(dims)
    for k in range(3):
        source = weights[planted["kv"][k]]
        moved[k] = source[planted["group"][k]][:, planted["dim"][k]]
        moved_dims[k] = dims[planted["kv"][k]][planted["dim"][k]]
    profits = {
        ("kv", "group", "dim"): np.einsum("abcr,xyzr->abcxyz", moved, weights),
        ("kv", "dim"): np.einsum("acr,xzr->acxz", moved_dims, dims),
    }
    solution, reached = assign_tree(node, profits)
    assert reached == pytest.approx(value(node, profits, solution))
    for name, index in planted.items():
        np.testing.assert_array_equal(solution[name], index)


def test_a_rotation_beside_a_permutation_on_one_path_is_found():
    """Grouped-query attention whose value dimensions are rotated."""
    rng = np.random.default_rng(1)
    node = Node("kv", 3, (Node("group", 4), Node("dim", 5, group="orthogonal")))
    order, groups = rng.permutation(3), np.stack([rng.permutation(4) for _ in range(3)])
    rotations = np.stack([rotate(rng.standard_normal((5, 5))) for _ in range(3)])
    weights, dims = rng.standard_normal((3, 4, 5, 64)), rng.standard_normal((3, 5, 64))
    moved = np.stack([np.einsum("dz,gzr->gdr", rotations[k], weights[order[k]][groups[k]]) for k in range(3)])
    profits = {
        ("kv", "group", "dim"): np.einsum("abcr,xyzr->abcxyz", moved, weights),
        ("kv", "dim"): np.einsum("kdz,kzr,xyr->kdxy", rotations, dims[order], dims),
    }
    solution, reached = assign_tree(node, profits)
    np.testing.assert_array_equal(solution["kv"], order)
    np.testing.assert_array_equal(solution["group"], groups)
    np.testing.assert_allclose(solution["dim"], rotations, atol=1e-10)
    assert reached == pytest.approx((weights**2).sum() + (dims**2).sum())


def test_threads_do_not_change_the_result():
    rng = np.random.default_rng(2)
    problems = [(HEADS, random_profits(rng, HEADS, [("head", "qk"), ("head", "vo")])) for _ in range(5)]
    alone = assign_all(problems, workers=1)
    for workers in (2, 4):
        for (a, x), (b, y) in zip(alone, assign_all(problems, workers), strict=True):
            assert x == y
            assert all(np.array_equal(a[name], b[name]) for name in a)
    single = assign_all(problems[:1], workers=3)[0]
    assert single[1] == alone[0][1]


def test_no_profit_leaves_everything_in_place():
    solution, reached = assign_tree(HEADS, {})
    assert reached == 0
    np.testing.assert_array_equal(solution["qk"], np.tile(np.arange(3), (3, 1)))
    solution, _ = assign_tree(HEADS, {("head",): -np.eye(3)})
    assert solution["vo"].shape == (3, 2)
    assert assign_all([]) == []


def test_siblings_with_children_cannot_share_an_axis():
    node = Node("a", 2, (Node("b", 2, (Node("c", 2),)), Node("d", 2)))
    with pytest.raises(InputError, match="b, d"):
        assign_tree(node, {("a", "b", "d"): np.zeros((2,) * 6)})
