from itertools import combinations

import numpy as np
import pytest
from method_driver import run

from merganser.errors import RecipeError

rng = np.random.default_rng(4)
BASE = rng.standard_normal((8, 6)).astype(np.float32)
COMMON = rng.standard_normal((8, 6))
MODELS = [(BASE + 0.1 * (COMMON + rng.standard_normal((8, 6)))).astype(np.float32) for _ in range(3)]


def ratio(deltas):
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in combinations(deltas, 2)]
    cosine = np.mean(cosines)
    return len(deltas) * cosine / (1 + (len(deltas) - 1) * cosine)


@pytest.mark.parametrize("step", [None, 3])
def test_whole_tensors(step):
    t = ratio([(m - BASE).ravel().astype(np.float64) for m in MODELS])
    expected = t * np.mean(MODELS, axis=0) + (1 - t) * BASE
    np.testing.assert_allclose(run("model_stock", MODELS, BASE, step=step), expected, atol=1e-6)


def test_row_by_row():
    t = np.array([ratio([(m - BASE)[i].astype(np.float64) for m in MODELS]) for i in range(8)])[:, None]
    merged = run("model_stock", MODELS, BASE, step=3, parameters={"filter_wise": True})
    np.testing.assert_allclose(merged, t * np.mean(MODELS, axis=0) + (1 - t) * BASE, atol=1e-5)


def test_vectors_are_one_row():
    models = [m[0] for m in MODELS]
    merged = run("model_stock", models, BASE[0], parameters={"filter_wise": True})
    np.testing.assert_allclose(merged, run("model_stock", models, BASE[0]), atol=1e-6)


def test_scale_of_the_task_vectors_does_not_matter():
    base = np.zeros_like(BASE)
    deltas = [m - BASE for m in MODELS]
    small = run("model_stock", [d * np.float32(1e-6) for d in deltas], base)
    np.testing.assert_allclose(small * 1e6, run("model_stock", deltas, base), rtol=1e-5)


def test_ends():
    np.testing.assert_allclose(run("model_stock", [MODELS[0]] * 2, BASE), MODELS[0], atol=1e-6)
    np.testing.assert_array_equal(run("model_stock", [BASE] * 2, BASE), BASE)
    np.testing.assert_allclose(run("model_stock", [BASE + 1, BASE - 1], BASE), BASE, atol=1e-5)
    with pytest.raises(RecipeError, match="at least 2"):
        run("model_stock", MODELS[:1], BASE)
