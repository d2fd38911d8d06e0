"""Choose few items that represent all, with weights."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from merganser.errors import InputError
from merganser.evolve.arrays import Array, Indices
from merganser.evolve.irt.model import Items

#: Principal components of embeddings that are clustered; runs of k-means, and their largest number of sweeps.
COMPONENTS, STARTS, SWEEPS = 32, 4, 100


@dataclass(frozen=True)
class Subset:
    """Distinct items and their weights (Σ = 1): Σ w y over them estimates the mean of y over all items."""

    items: Indices
    weights: Array

    def __post_init__(self) -> None:
        if self.items.shape != self.weights.shape or self.items.ndim != 1:
            raise InputError(f"{self.items.shape} items need as many weights, not {self.weights.shape}")
        if len(np.unique(self.items)) != len(self.items):
            raise InputError("a subset lists each item once")

    def __len__(self) -> int:
        return len(self.items)


def random(count: int, size: int, *, seed: int = 0) -> Subset:
    """Draw `size` of `count` items uniformly, with weight 1/size each, as in the thesis."""
    _check(count, size)
    chosen = np.random.default_rng(seed).choice(count, size, replace=False)
    return Subset(np.sort(chosen).astype(np.intp), np.full(size, 1 / size))


def stratified(labels: Sequence[Hashable], size: int, *, seed: int = 0) -> Subset:
    """Draw items of each label in proportion to its share (largest remainders), weighted so that shares are exact.

    A label too rare to get an item is left out, and the others share its weight.
    """
    _check(len(labels), size)
    strata: dict[Hashable, list[int]] = {}
    for position, label in enumerate(labels):
        strata.setdefault(label, []).append(position)
    quotas = np.array([len(members) * size / len(labels) for members in strata.values()])
    counts = np.floor(quotas).astype(int)
    for index in np.argsort(counts - quotas, kind="stable")[: size - counts.sum()]:
        counts[index] += 1
    generator = np.random.default_rng(seed)
    items, weights = [], []
    for members, count in zip(strata.values(), counts.tolist(), strict=True):
        items += list(generator.choice(members, count, replace=False))
        weights += [len(members) / max(count, 1)] * count
    order = np.argsort(items)
    share = np.array(weights) / sum(weights)
    return Subset(np.array(items, dtype=np.intp)[order], share[order])


def irt_clustering(items: Items, size: int, *, seed: int = 0) -> Subset:
    """Return the items nearest to the centroids of k-means on [a ‖ β], weighted by the share of their cluster."""
    return clustering(items.embedding, size, seed=seed)


def representation_clustering(embeddings: Sequence[ArrayLike], size: int, *, seed: int = 0) -> Subset:
    """Cluster the principal components of the endpoints' concatenated embeddings (items × width, one per model)."""
    joined = np.concatenate([np.asarray(e, dtype=np.float64) for e in embeddings], axis=1)
    centred = joined - joined.mean(0)
    left, sigma, _ = np.linalg.svd(centred, full_matrices=False)
    return clustering((left * sigma)[:, :COMPONENTS], size, seed=seed)


def clustering(points: Array, size: int, *, seed: int = 0) -> Subset:
    """Return the point nearest to the centroid of each cluster, weighted by the cluster's share of all points.

    Equal points are one cluster, which k-means cannot split. If its share is 2/size or more, it contributes a
    proportional number of its points, drawn at random, which share its weight. Items left when every distinct point is
    a cluster go to the clusters whose points represent most.
    """
    _check(len(points), size)
    pattern, counts = _number_distinct(points)
    allotted = np.where(counts * size >= 2 * len(points), counts * size // len(points), 0)
    rest = np.flatnonzero(allotted[pattern] == 0)
    left = size - int(allotted.sum())
    items, weights = [], []
    if len(rest) and left < len(np.unique(pattern[rest])):
        representatives, shares = _pick_representatives(points[rest], left, seed)
        items += rest[representatives].tolist()
        weights += (shares * len(rest) / len(points)).tolist()
    else:
        _allot(allotted, counts, size)
    generator = np.random.default_rng(seed)
    for each in np.flatnonzero(allotted):
        members = np.flatnonzero(pattern == each)
        items += generator.choice(members, allotted[each], replace=False).tolist()
        weights += [counts[each] / len(points) / allotted[each]] * int(allotted[each])
    order = np.argsort(items)
    return Subset(np.array(items, dtype=np.intp)[order], np.array(weights)[order])


def _number_distinct(points: Array) -> tuple[Indices, Indices]:
    """Return which distinct point each point is, up to rounding, and how many points are equal to it."""
    scale = np.maximum(points.std(0), 1e-300)
    _, pattern, counts = np.unique(np.round(points / scale, 6), axis=0, return_inverse=True, return_counts=True)
    return pattern.reshape(-1).astype(np.intp), counts.astype(np.intp)


def _allot(allotted: Indices, counts: Indices, size: int) -> None:
    """Give every distinct point its first item, and the others one by one to where an item represents most."""
    np.maximum(allotted, 1, out=allotted)
    while allotted.sum() < size:
        allotted[np.where(allotted < counts, counts / allotted, -1.0).argmax()] += 1
    while allotted.sum() > size:
        allotted[np.where(allotted > 1, counts / allotted, np.inf).argmin()] -= 1


def _pick_representatives(points: Array, size: int, seed: int) -> tuple[Indices, Array]:
    """Return the point nearest to each centroid of `size` clusters, and the cluster's share of the points."""
    labels, centroids = kmeans(points, size, seed=seed)
    distance = ((points - centroids[labels]) ** 2).sum(1)
    order = np.lexsort((np.arange(len(points)), distance))
    representatives = np.array([order[labels[order] == k][0] for k in range(size)], dtype=np.intp)
    return representatives, np.bincount(labels, minlength=size) / len(points)


def kmeans(points: Array, clusters: int, *, seed: int = 0) -> tuple[Indices, Array]:
    """Return labels and centroids of the best of several runs of Lloyd's algorithm from k-means++ starts, no cluster
    empty.
    """
    generator = np.random.default_rng(seed)
    runs = [_lloyd(points, _spread(points, clusters, generator)) for _ in range(STARTS)]
    labels, centroids, _ = min(runs, key=lambda run: run[2])
    return labels, centroids


def _check(count: int, size: int) -> None:
    if not 1 <= size <= count:
        raise InputError(f"a subset of {size} items out of {count} is not possible")


def _measure_distances(points: Array, centroids: Array) -> Array:
    cross = points @ centroids.T
    squares: Array = (points**2).sum(1)[:, None] - 2 * cross + (centroids**2).sum(1)
    return np.maximum(squares, 0.0)


def _spread(points: Array, clusters: int, generator: np.random.Generator) -> Array:
    """Return k-means++ centres: each is drawn with probability proportional to its squared distance from the
    nearest.
    """
    chosen = [int(generator.integers(len(points)))]
    nearest = _measure_distances(points, points[chosen])[:, 0]
    while len(chosen) < clusters:
        nearest[chosen] = 0.0
        total = nearest.sum()
        if total > 0:
            chosen.append(int(generator.choice(len(points), p=nearest / total)))
        else:  # fewer distinct points than clusters
            chosen.append(int(generator.choice(np.setdiff1d(np.arange(len(points)), chosen))))
        nearest = np.minimum(nearest, _measure_distances(points, points[chosen[-1:]])[:, 0])
    return points[chosen]


def _lloyd(points: Array, centroids: Array) -> tuple[Indices, Array, float]:
    labels = np.full(len(points), -1, dtype=np.intp)
    for _ in range(SWEEPS):
        squares = _measure_distances(points, centroids)
        updated = _fill_empty(squares.argmin(1), squares, len(centroids))
        if np.array_equal(updated, labels):
            break
        labels = updated
        sums = np.zeros_like(centroids)
        np.add.at(sums, labels, points)
        centroids = sums / np.bincount(labels, minlength=len(centroids))[:, None]
    inertia = float(((points - centroids[labels]) ** 2).sum())
    return labels, centroids, inertia


def _fill_empty(labels: Indices, squares: Array, clusters: int) -> Indices:
    """Give every empty cluster the point that its own cluster represents worst."""
    labels = labels.copy()
    counts = np.bincount(labels, minlength=clusters)
    own = squares[np.arange(len(labels)), labels]
    for empty in np.flatnonzero(counts == 0):
        movable = np.where(counts[labels] > 1, own, -1.0)
        moved = int(movable.argmax())
        counts[labels[moved]] -= 1
        labels[moved], own[moved] = empty, -1.0
        counts[empty] = 1
    return labels
