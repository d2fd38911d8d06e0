import numpy as np
import pytest
from method_driver import run

rng = np.random.default_rng(5)
BASE = rng.standard_normal((9, 6)).astype(np.float32)
MODELS = [BASE + s * rng.standard_normal((9, 6)).astype(np.float32) for s in (0.1, 0.2, 0.05)]


def by_hand(models, topk):
    deltas = np.stack([m - BASE for m in models]).astype(np.float64)
    if topk < 1:
        variance = np.stack([m - BASE for m in models]).var(0)
        k = int(np.count_nonzero(variance) * topk)
        mask = np.zeros(BASE.size, bool)
        mask[np.lexsort((np.arange(BASE.size), -variance.ravel()))[:k]] = True
        deltas = deltas * mask.reshape(BASE.shape)
    energy = (deltas**2).mean((1, 2))
    weight = (energy / energy.sum() if energy.sum() else np.full(len(models), 1 / len(models))).reshape(-1, 1, 1)
    agree = np.sign(deltas) == np.where(deltas.sum(0) >= 0, 1, -1)
    mass = (weight * agree).sum(0)
    return BASE + (weight * agree * deltas).sum(0) / np.where(mass == 0, 1, mass)


@pytest.mark.parametrize("step", [None, 1, 4])
@pytest.mark.parametrize("topk", [0.0, 0.3, 0.9, 1.0])
def test_sce(topk, step):
    merged = run("sce", MODELS, BASE, step=step, parameters={"select_topk": topk})
    np.testing.assert_allclose(merged, by_hand(MODELS, topk), atol=1e-6)


def test_tiny_task_vectors_are_weighed_like_large_ones():
    zero = np.zeros_like(BASE)
    deltas = [m - BASE for m in MODELS]
    tiny = run("sce", [d * np.float32(1e-5) for d in deltas], zero)
    np.testing.assert_allclose(tiny * 1e5, run("sce", deltas, zero), rtol=1e-4, atol=1e-7)


def test_a_share_of_the_entries_that_vary():
    models = [BASE.copy(), BASE.copy()]
    models[1][:3] += rng.random((3, 6)).astype(np.float32)
    merged = run("sce", models, BASE, parameters={"select_topk": 0.5})
    assert np.count_nonzero(merged.numpy() - BASE) == 9
