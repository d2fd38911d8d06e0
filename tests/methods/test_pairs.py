import numpy as np
import pytest
from method_driver import run

rng = np.random.default_rng(6)
BASE = rng.standard_normal((12, 7)).astype(np.float32)
MODEL = BASE + 0.1 * rng.standard_normal((12, 7)).astype(np.float32)


def test_nearswap():
    t = 0.05
    weight = np.clip(t / np.maximum(np.abs(BASE - MODEL), 1e-6), 0, 1)
    merged = run("nearswap", [MODEL], BASE, parameters={"t": t})
    np.testing.assert_allclose(merged, weight * MODEL + (1 - weight) * BASE, atol=1e-6)


def test_nearswap_ends():
    np.testing.assert_array_equal(run("nearswap", [MODEL], BASE, parameters={"t": 0.0}), BASE)
    np.testing.assert_allclose(run("nearswap", [MODEL], BASE, parameters={"t": 10.0}), MODEL, atol=1e-6)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) + 1e-8


def fused(base, model):
    base, model = base.astype(np.float64), model.astype(np.float64)
    p, q = softmax(model), softmax(base)
    importance = np.abs(model - base) * (p * np.log(p / q)).sum(-1, keepdims=True)
    ranked = np.sort(importance.ravel())
    q1, median, q3 = (ranked[int(share * (ranked.size - 1))] for share in (0.25, 0.5, 0.75))
    return np.where(importance >= median + 1.5 * (q3 - q1), model, base)


@pytest.mark.parametrize("step", [None, 1, 5])
@pytest.mark.parametrize("shape", [(12, 7), (84,), (3, 4, 7)])
def test_arcee_fusion(shape, step):
    merged = run("arcee_fusion", [MODEL.reshape(shape)], BASE.reshape(shape), step=step)
    np.testing.assert_allclose(merged, fused(BASE.reshape(shape), MODEL.reshape(shape)), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1e-4])
def test_arcee_fusion_of_close_models(scale):
    base = 0.05 * rng.standard_normal((40, 50)).astype(np.float32)
    model = base + scale * rng.standard_normal((40, 50)).astype(np.float32)
    np.testing.assert_array_equal(run("arcee_fusion", [model], base), fused(base, model).astype(np.float32))


def test_arcee_fusion_of_equal_models():
    np.testing.assert_array_equal(run("arcee_fusion", [BASE], BASE, step=5), BASE)
