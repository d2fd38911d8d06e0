import numpy as np
import pytest
import torch

from merganser.methods.adapters import CoreSpace, Knots, core_space, knots, truncate_pair
from merganser.methods.base import Group
from merganser.methods.isotropic import IsoC
from merganser.methods.registry import build
from merganser.methods.tsv import TSV


def pairs_of(t, d=30, m=20, r=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(d, r, generator=rng), torch.randn(r, m, generator=rng)) for _ in range(t)]


def products(pairs):
    return [(b @ a).double().numpy() for b, a in pairs]


def summing(t):
    return build(TSV, {"low_rank": False, "orthogonalize": "none"}, [str(i) for i in range(t)])


@pytest.mark.parametrize("space", [knots, core_space])
def test_a_linear_rule_loses_nothing(space):
    pairs = pairs_of(3)
    b, a = space(pairs, summing(3))
    assert b.shape[1] == a.shape[0] <= 9
    np.testing.assert_allclose(b @ a, sum(products(pairs)), atol=1e-4)


def test_knots_merges_the_right_factors_of_one_svd():
    pairs = pairs_of(3)
    joined = np.concatenate(products(pairs), axis=1)
    u, s, vt = np.linalg.svd(joined, full_matrices=False)
    parts = np.split((s[:, None] * vt)[:9], 3, axis=1)
    total = sum(parts)
    a, b, c = np.linalg.svd(total, full_matrices=False)
    wanted = u[:, :9] @ (b.mean() * a @ c)
    found = knots(pairs, build(IsoC, {}, "abc"))
    np.testing.assert_allclose(found[0] @ found[1], wanted, atol=1e-4)


def test_core_space_of_an_invariant_rule_equals_full_space():
    """TSV-M commutes with rotations, so merging cores equals merging the matrices where ranks agree."""
    pairs = pairs_of(3)
    labels = ("0", "1", "2")
    rule = build(TSV, {"rank_fraction": 1 / 3}, labels)
    b, a = core_space(pairs, rule)
    models = tuple(torch.from_numpy(p) for p in products(pairs))
    base = torch.zeros_like(models[0])
    full = build(TSV, {"rank_fraction": 3.01 / 20}, labels).merge(Group("w", models, base, labels, (30, 20)))
    np.testing.assert_allclose(b @ a, full, atol=1e-6)


def test_different_ranks_and_duplicates():
    pairs = [pairs_of(1, r=2)[0], pairs_of(1, r=4, seed=1)[0], pairs_of(1, r=2)[0]]
    b, a = core_space(pairs, summing(3))
    assert b.shape[1] <= 6
    np.testing.assert_allclose(b @ a, sum(products(pairs)), atol=1e-4)


@pytest.mark.parametrize("rule", [Knots, CoreSpace])
def test_whole_models_of_low_rank(rule):
    deltas = tuple(torch.from_numpy(p).float() for p in products(pairs_of(2)))
    base = torch.randn(30, 20)
    labels = ("a", "b")
    group = Group("w", tuple(base + d for d in deltas), base, labels, (30, 20))
    found = build(rule, {"inner": "iso_c"}, labels).merge(group) - base
    u, s, vt = np.linalg.svd(sum(deltas).double().numpy(), full_matrices=False)
    wanted = (s[:6].sum() / 6) * u[:, :6] @ vt[:6]
    np.testing.assert_allclose(found, wanted, atol=1e-3)


def test_truncated_pairs_are_the_best_of_their_rank():
    (pair,) = pairs_of(1, r=5)
    u, s, vt = np.linalg.svd(products([pair])[0], full_matrices=False)
    b, a = truncate_pair(pair, 2)
    np.testing.assert_allclose(b @ a, (u[:, :2] * s[:2]) @ vt[:2], atol=1e-4)
    np.testing.assert_allclose(b.norm(dim=0), a.norm(dim=1), rtol=1e-9)
