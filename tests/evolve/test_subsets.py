from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.errors import InputError
from merganser.evolve import subsets
from merganser.evolve.irt import Items


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(0, 100))
def test_every_extractor_gives_distinct_items_and_a_partition_of_unity(data, count, seed):
    size = data.draw(st.integers(1, count))
    rng = np.random.default_rng(seed)
    points = rng.integers(0, 3, (count, 2)).astype(float)  # many duplicates
    for subset in (
        subsets.random(count, size, seed=seed),
        subsets.stratified(points[:, 0].tolist(), size, seed=seed),
        subsets.irt_clustering(Items(points, points[:, 0]), size, seed=seed),
        subsets.representation_clustering([points, points + 1], size, seed=seed),
    ):
        assert len(subset) == size == len(set(subset.items.tolist()))
        assert 0 <= subset.items.min() <= subset.items.max() < count
        assert subset.weights.min() > 0
        assert subset.weights.sum() == pytest.approx(1)


def test_stratified_keeps_the_shares_exactly():
    labels = ["a"] * 60 + ["b"] * 30 + ["c"] * 10
    subset = subsets.stratified(labels, 7)
    share = {k: sum(w for i, w in zip(subset.items, subset.weights, strict=True) if labels[i] == k) for k in "abc"}
    assert share == pytest.approx({"a": 0.6, "b": 0.3, "c": 0.1})


def test_clusters_are_found_and_weighted_by_their_share():
    rng = np.random.default_rng(0)
    centres, sizes = np.array([[0, 0], [10, 0], [0, 10]]), [50, 30, 20]
    points = np.concatenate([c + rng.normal(size=(n, 2)) for c, n in zip(centres, sizes, strict=True)])
    subset = subsets.clustering(points, 3)
    assert sorted(subset.weights) == pytest.approx([0.2, 0.3, 0.5])
    for item, weight in zip(subset.items, subset.weights, strict=True):
        group = next(g for g, n in enumerate(sizes) if weight == n / 100)
        members = points[sum(sizes[:group]) : sum(sizes[: group + 1])]
        nearest = np.linalg.norm(members - members.mean(0), axis=1).argmin()
        assert item == sum(sizes[:group]) + nearest


def test_kmeans_is_no_worse_than_sklearn():
    cluster = pytest.importorskip("sklearn.cluster")
    points = np.random.default_rng(1).normal(size=(200, 4))
    labels, centroids = subsets.kmeans(points, 8)
    ours = ((points - centroids[labels]) ** 2).sum()
    assert ours < 1.03 * cluster.KMeans(8, n_init=4, random_state=0).fit(points).inertia_


def test_deterministic_by_seed():
    points = np.random.default_rng(2).normal(size=(50, 3))
    assert subsets.clustering(points, 9, seed=1).items.tolist() == subsets.clustering(points, 9, seed=1).items.tolist()
    assert subsets.random(50, 9, seed=1).items.tolist() != subsets.random(50, 9, seed=2).items.tolist()


@pytest.mark.parametrize("size", [0, 6])
def test_impossible_sizes(size):
    with pytest.raises(InputError, match="out of 5"):
        subsets.random(5, size)


@pytest.mark.parametrize("size", [20, 100, 200])
def test_items_that_coincide_share_the_weight_of_their_cluster(size):
    """Three models know eight patterns of answers; no item may stand for a whole one."""
    patterns = np.random.default_rng(0).integers(0, 2, (400, 3)).astype(float)
    subset = subsets.clustering(patterns, size)
    assert 1 / (subset.weights**2).sum() > 0.9 * size
    names = patterns @ [4, 2, 1]
    for name in range(8):
        share = subset.weights[names[subset.items] == name].sum()
        assert share == pytest.approx((names == name).mean()), "every pattern has its own weight"


def test_a_heavy_pattern_among_many_others_is_shared_too():
    rng = np.random.default_rng(1)
    points = np.concatenate([np.zeros((300, 2)), 5 + rng.normal(size=(100, 2))])
    subset = subsets.clustering(points, 40)
    heavy = subset.items < 300
    assert heavy.sum() == 30
    assert subset.weights[heavy].sum() == pytest.approx(0.75)
    assert subset.weights.max() < 0.1
