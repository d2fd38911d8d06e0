"""Compositions kept for sets that come again: within their bytes, and as whole matrices where that pays."""

import pytest

from merganser.routing.adaptive import AdaptiveModel
from support.expert_nets import small_library


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return small_library(tmp_path_factory.mktemp("caching"), rank=4)


def test_sets_have_no_order(built):
    model = AdaptiveModel(*built)
    first = model.composition(frozenset(["a", "c"]), 0)
    second = model.composition(frozenset(["c", "a"]), 0)
    assert first is second
    assert (model.cache.hits, model.cache.misses) == (1, 1)
    assert len(model.with_cache().cache) == 0
    assert len(model.cache) == 1


def test_the_cache_keeps_to_its_bytes_and_forgets_the_oldest(built):
    size = AdaptiveModel(*built).composer.compose(frozenset("a")).nbytes
    model = AdaptiveModel(*built, cache_bytes=int(2.5 * size))
    for task in "abca":
        model.composition(frozenset(task), 0)
        assert model.cache.nbytes <= 2.5 * size
    assert (model.cache.hits, model.cache.misses, len(model.cache)) == (0, 4, 2)


def test_matrices_are_built_when_counting_says_so(built):
    model = AdaptiveModel(*built)
    probe = model.composer.compose(frozenset("a"))
    limit = probe.to_build // probe.per_row
    assert model.composition(frozenset("a"), limit).low_rank
    built_once = model.composition(frozenset("a"), 1)
    assert not built_once.low_rank
    assert model.composition(frozenset("a"), 10**6) is built_once
    cramped = AdaptiveModel(*built, cache_bytes=probe.nbytes)
    assert not cramped.composition(frozenset("a"), limit + 1).low_rank, "it pays for this time alone"
    assert cramped.composition(frozenset("a"), 1).low_rank, "and is not kept without room"
