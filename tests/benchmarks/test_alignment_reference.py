"""The algorithm as printed, and the faster evaluation that tells how many iterations it takes."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from benchmarks.alignment import Comparison, growth, spec_of
from benchmarks.alignment_reference import Pairs, RunningSum, ascend, objective, rounded
from benchmarks.zoo.architectures import MLP
from merganser.align import permutations, symmetry
from merganser.align.solver import objective_of


@pytest.fixture(scope="module")
def problem():
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        states.append(MLP(12, 5, (9, 14, 7)).state_dict())
    return states, symmetry(MLP(12, 5, (9, 14, 7)), torch.randn(2, 12))


def test_the_running_sum_takes_the_same_steps(problem):
    """With exact line searches: where a coarse one stops depends on rounding. The running sum is in float32."""
    models, known = problem
    models = [{n: t.double() for n, t in m.items()} for m in models]
    dense, fast = Pairs(models, spec_of(known)), RunningSum(models, known)
    dense.matrices = [{n: m.double() for n, m in own.items()} for own in dense.matrices]
    exact = {"tolerance": 1e-9, "evaluations": 200}
    for a, b in islice(zip(ascend(dense, **exact), ascend(fast, **exact), strict=False), 6):
        assert a.objective == pytest.approx(b.objective, rel=5e-4)
        assert a.size == pytest.approx(b.size, abs=2e-3)
    for own, other in zip(dense.matrices, fast.matrices, strict=True):
        for name in own:
            torch.testing.assert_close(own[name], other[name].double(), atol=1e-2, rtol=0)


def test_gradients_agree_away_from_the_identity(problem):
    models, known = problem
    dense, fast = Pairs(models, spec_of(known)), RunningSum(models, known)
    list(ascend(fast, max_iterations=2))
    dense.matrices = fast.matrices
    for own, other in zip(dense.gradient(), fast.gradient(), strict=True):
        for name in own:
            torch.testing.assert_close(own[name], other[name], atol=1e-5, rtol=1e-4)


def test_the_gradient_is_the_slope_of_the_objective(problem):
    """f is linear in one matrix of one model, so a difference of two values is exact."""
    models, known = problem
    dense = Pairs([{n: t.double() for n, t in m.items()} for m in models], spec_of(known))
    dense.matrices = [{n: m.double() for n, m in own.items()} for own in dense.matrices]
    before = objective(dense.models, dense.spec, dense.matrices)
    for name in dense.sizes:
        slope = dense.gradient()[1][name].double()
        change = torch.randn(slope.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        moved = [dict(own) for own in dense.matrices]
        moved[1][name] = moved[1][name] + change
        after = objective(dense.models, dense.spec, moved)
        assert after - before == pytest.approx(float((slope * change).sum()), rel=1e-4)


def test_rounding_gives_permutations_and_their_objective(problem):
    models, known = problem
    fast = RunningSum(models, known)
    list(ascend(fast, max_iterations=20))
    found = rounded(fast.matrices)
    for own in found:
        permutations.check(known, own)
    hard = [{n: torch.eye(len(p))[:, torch.from_numpy(p)] for n, p in own.items()} for own in found]
    dense = Pairs(models, spec_of(known))
    assert objective(dense.models, dense.spec, hard) == pytest.approx(objective_of(models, found, known), rel=1e-4)


def test_ratios_and_growth():
    case = Comparison("MLP", 3, 2.0, 10, 5.0, 3, 1.0, 200, 4.0, 0.0)
    assert case.ratio == 100.0
    assert case.ratio_of_iterations == 5.0
    assert "100.0×" in str(case)
    assert growth({2: 9.0, 5: 1.0, 10: 4.0}) == pytest.approx(2.0)
