"""PCB-Merging against a naive float64 version of the paper's formulas."""

import numpy as np
import pytest
from method_driver import run


def experts(count, shape=(12, 10), seed=0):
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(shape).astype(np.float32)
    return base, [base + 0.1 * rng.standard_normal(shape).astype(np.float32) for _ in range(count)]


def softmax(values):
    powers = np.exp(values - values.max())
    return powers / powers.sum()


def norm(values):
    return (values - values.min()) / (values.max() - values.min())


def naive(base, models, density=0.2, scale=1.0):
    deltas = [m.astype(np.float64).ravel() - base.astype(np.float64).ravel() for m in models]
    merged, mass = np.zeros_like(deltas[0]), np.zeros_like(deltas[0])
    for own in deltas:
        score = softmax(len(deltas) * norm(own * own)) * sum(softmax(norm(own * other)) for other in deltas)
        keep = max(1, int(density * own.size))
        score[np.argsort(-score, kind="stable")[keep:]] = 0
        merged += score * own
        mass += score
    return base + scale * np.divide(merged, mass, out=np.zeros_like(mass), where=mass > 0).reshape(base.shape)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("step", [None, 5])
def test_the_formulas(count, density, step):
    base, models = experts(count)
    found = run("pcb", models, base, step=step, parameters={"density": density, "scale": 1.2})
    np.testing.assert_allclose(found, naive(base, models, density, 1.2), rtol=1e-4, atol=1e-5)


def test_identical_experts_are_one():
    base, models = experts(1)
    for count in (1, 4):
        found = run("pcb", models * count, base, parameters={"density": 1.0})
        np.testing.assert_allclose(found, models[0], rtol=1e-5, atol=1e-6)


def test_more_experts_than_entries():
    base, models = experts(7, (2, 2))
    np.testing.assert_allclose(
        run("pcb", models, base, parameters={"density": 1.0}), naive(base, models, 1.0), rtol=1e-4, atol=1e-5
    )
