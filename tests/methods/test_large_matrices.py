"""Matrices large enough for float32 decompositions, against the published algorithms in float64."""

import pytest
import torch

from benchmarks import published
from benchmarks.lowrank import RULES as PUBLISHED
from benchmarks.lowrank import task_matrix
from merganser.methods.base import Group
from merganser.methods.spectral import STAR
from merganser.methods.wudi import WUDI

RULES = {**PUBLISHED, "star": STAR, "wudi": WUDI}


def merge(method, deltas, **options):
    return RULES[method](**options).merge(Group("w", tuple(deltas), torch.zeros_like(deltas[0])))


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module", params=[(512, 512), (520, 900)], ids=lambda shape: "×".join(map(str, shape)))
def deltas(request):
    return [task_matrix(request.param, seed) for seed in range(4)]


@pytest.mark.parametrize("method", list(PUBLISHED))
def test_merges_are_within_1e_4_of_the_published_ones(method, deltas):
    wanted = published.METHODS[method]([delta.double() for delta in deltas])
    quick, exact = merge(method, deltas), merge(method, deltas, exact=True)
    assert error(quick, wanted) < 1e-4
    assert error(exact, wanted) < 2e-6
    assert quick.dtype == exact.dtype == torch.float32


@pytest.mark.parametrize("method", list(PUBLISHED))
def test_low_rank_experts_are_merged_as_exactly_as_before(method):
    """LoRA-like differences: float32 could not tell their rank, so nothing is taken from it."""
    rng = torch.Generator().manual_seed(0)
    low = [torch.randn(600, 4, generator=rng) @ torch.randn(4, 520, generator=rng) for _ in range(4)]
    assert error(merge(method, low), merge(method, low, exact=True)) < 1e-5


def test_order_of_the_models_does_not_matter(deltas):
    assert error(merge("tsv", deltas[::-1]), merge("tsv", deltas)) < 1e-4


@pytest.mark.parametrize("distance", [None, 1e-1, 5e-3, 1e-3, 1e-4])
@pytest.mark.parametrize("method", ["tsv", "iso_cts"])
def test_many_experts_some_of_them_alike(method, distance):
    """Float32 and float64 agree whether experts are far apart or nearly the same."""
    experts = [task_matrix((512, 600), seed) for seed in range(8)]
    if distance is not None:
        noise = task_matrix((512, 600), 99)
        experts[1] = experts[0] + distance * float(experts[0].norm() / noise.norm()) * noise
    quick, exact = merge(method, experts), merge(method, experts, exact=True)
    assert error(quick, exact) < 1e-4
    if distance is None:
        assert error(exact, published.METHODS[method]([expert.double() for expert in experts])) < 2e-6


@pytest.mark.parametrize("distance", [0.0, 1e-6])
@pytest.mark.parametrize("seed", range(6))
def test_an_expert_that_is_there_twice(seed, distance):
    """Merged copies have low rank, whose null vectors LAPACK's quicker routine may fail to tell apart."""
    twin, other, noise = torch.randn(3, 640, 512, generator=torch.Generator().manual_seed(seed))
    experts = [twin, twin + distance * noise, other]
    assert error(merge("tsv", experts), merge("tsv", experts, exact=True)) < 1e-4


def test_star_keeps_the_leading_components_of_large_matrices(deltas):
    wanted = 0
    for delta in deltas:
        u, s, vh = torch.linalg.svd(delta.double(), full_matrices=False)
        r = 1 + int((s.cumsum(0) < 0.1 * s.sum()).sum())
        wanted = wanted + (u[:, :r] * s[:r]) @ vh[:r] * (s.sum() / s[:r].sum()) / len(deltas)
    assert error(merge("star", deltas, nuclear_share=0.1), wanted) < 1e-4


@pytest.mark.parametrize("damping", [1e-6, 1e-3, 1e-2])
def test_wudi_finds_the_minimum_of_large_matrices(deltas, damping):
    wide = [delta.double() for delta in deltas]
    grams = [delta.T @ delta / delta.square().sum() for delta in wide]
    start, curvature = sum(wide), sum(grams)
    ridge = curvature + damping * curvature.norm() * torch.eye(len(curvature))
    gap = sum(delta @ gram for delta, gram in zip(wide, grams, strict=True)) - start @ curvature
    assert error(merge("wudi", deltas, damping=damping), start + gap @ torch.linalg.inv(ridge)) < 1e-4


@pytest.mark.parametrize("size", [1e-24, 1e18])
def test_wudi_in_float32_does_not_depend_on_the_size_of_weights(size):
    """The squares of these do not fit into float32."""
    deltas = [task_matrix((512, 512), seed) for seed in range(2)]
    found = merge("wudi", [size * delta for delta in deltas])
    assert error(found.double() / size, merge("wudi", deltas).double()) < 3e-5  # rounding of other inputs
