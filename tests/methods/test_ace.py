"""ACE-Merging against a naive float64 version of the paper's formulas."""

import numpy as np
import pytest
from method_driver import run

RNG = np.random.default_rng(4)


def experts(shape, sizes, seed=0):
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(shape).astype(np.float32)
    decay = np.exp(-3 * np.arange(shape[1]) / shape[1])
    return base, [base + (size * rng.standard_normal(shape) * decay).astype(np.float32) for size in sizes]


def naive(base, models, epsilon=1e-2, normalize=None, threshold=0.3, fraction=0.3):
    deltas = [m.astype(np.float64) - base for m in models]
    tasks, columns = len(deltas), base.shape[1]
    covariances = [(d - d.mean(0)).T @ (d - d.mean(0)) for d in deltas]
    traces = [np.trace(c) for c in covariances]
    logarithms = [np.log((d**2).sum()) for d in deltas]
    gamma = np.var(logarithms, ddof=1) / np.mean(logarithms) ** 2 if tasks > 1 else 0
    normalize = gamma > threshold if normalize is None else normalize
    ridge = epsilon * np.mean(traces) / columns
    divisors = traces if normalize else [1.0] * tasks
    covariances = [c / d for c, d in zip(covariances, divisors, strict=True)]
    regular = [c + ridge / d * np.eye(columns) for c, d in zip(covariances, divisors, strict=True)]
    prior = np.ones((columns, 1)) @ sum(covariances).mean(0, keepdims=True)
    merged = sum(d @ r for d, r in zip(deltas, regular, strict=True)) @ np.linalg.inv(sum(regular) + prior)
    if normalize:
        mean = sum(covariances) / tasks
        residual = sum(d @ (c - mean) for d, c in zip(deltas, covariances, strict=True))
        u, s, vt = np.linalg.svd(merged + residual, full_matrices=False)
        k = int(len(s) * fraction)
        merged = merged + s[:k].mean() * u[:, :k] @ vt[:k]
    return base + merged


@pytest.mark.parametrize("shape", [(20, 20), (33, 12), (12, 33)])
@pytest.mark.parametrize(("choice", "normalize"), [("always", True), ("never", False), ("auto", None)])
def test_the_formulas(shape, choice, normalize):
    base, models = experts(shape, (0.1, 0.2, 0.15))
    found = run("ace", models, base, parameters={"normalize": choice, "epsilon": 0.05})
    np.testing.assert_allclose(found, naive(base, models, 0.05, normalize), rtol=1e-4, atol=1e-4)


def test_unlike_sizes_are_normalised():
    """Square norms from 0.1 to 10 lie on both sides of 1: their logarithms have a mean near 0, and γ is large."""
    base, models = experts((16, 16), (0.02, 1.0))
    automatic, always, never = (
        run("ace", models, base, parameters={"normalize": n}) for n in ("auto", "always", "never")
    )
    np.testing.assert_array_equal(automatic, always)
    assert np.abs(np.asarray(always) - np.asarray(never)).max() > 1e-3


def test_a_direction_that_only_one_task_uses_keeps_its_size():
    """Tasks with separate inputs do not share a denominator: each keeps its task matrix where plain means halve it."""
    base = np.zeros((40, 20), np.float32)
    one, two = (np.zeros_like(base) for _ in range(2))
    one[:, :10] = RNG.standard_normal((40, 10))
    two[:, 10:] = RNG.standard_normal((40, 10))
    one, two = ((m - m.mean(0)).astype(np.float32) for m in (one, two))
    found = np.asarray(run("ace", [one, two], base, parameters={"epsilon": 1e-6, "normalize": "never"}))
    assert np.abs(found - (one + two)).max() < 0.35 * np.abs(one + two).max()
    assert np.linalg.norm(found) > 0.9 * np.linalg.norm(one + two)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_ends(count):
    """One expert, identical experts, and more experts than rows, are finite and near the expert."""
    base, (model,) = experts((6, 5), (0.1,))
    found = np.asarray(run("ace", [model] * count, base, parameters={"normalize": "never"}))
    np.testing.assert_allclose(found, naive(base, [model] * count, normalize=False), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(run("ace", [base] * count, base), base)


def test_rows_that_all_moved_alike_have_no_covariance():
    base = np.zeros((4, 3), np.float32)
    shift = np.tile(np.array([1.0, 2.0, 3.0], np.float32), (4, 1))
    np.testing.assert_allclose(run("ace", [shift, 3 * shift], base), 2 * shift)
