import numpy as np
import pytest
from method_driver import run

from merganser.methods.registry import lookup

rng = np.random.default_rng(7)
BASE = rng.standard_normal((10, 6)).astype(np.float32)
SPARSE = [(rng.standard_normal((10, 6)) * (rng.random((10, 6)) < 0.4)).astype(np.float32) for _ in range(3)]
MODELS = [BASE + d for d in SPARSE]


def by_hand(models, epsilon, gains=None):
    merged = BASE.astype(np.float64).copy()
    for place in np.ndindex(BASE.shape):
        changed = [(t, m[place] - BASE[place]) for t, m in enumerate(models) if abs(m[place] - BASE[place]) > epsilon]
        if len(changed) == 1:
            t, delta = changed[0]
            merged[place] += delta * (gains[t] if gains else 1)
        elif changed:
            merged[place] += np.mean([delta for _, delta in changed])
    return merged


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_ram(epsilon):
    merged = run("ram", MODELS, BASE, parameters={"epsilon": epsilon})
    np.testing.assert_allclose(merged, by_hand(MODELS, epsilon), atol=1e-6)


@pytest.mark.parametrize("step", [None, 3])
def test_ram_plus(step):
    changed = np.stack([np.abs(m - BASE) > 1e-5 for m in MODELS])
    counts = changed.sum(0)
    shared, unique = (changed & (counts > 1)).sum((1, 2)), (changed & (counts == 1)).sum((1, 2))
    gains = (1 + 0.5 * np.minimum(shared / unique, 1.2)).tolist()
    merged = run("ram_plus", MODELS, BASE, step=step, parameters={"r": 0.5, "alpha": 1.2})
    np.testing.assert_allclose(merged, by_hand(MODELS, 1e-5, gains), atol=1e-6)


def test_ram_plus_without_unique_or_shared_entries():
    np.testing.assert_allclose(run("ram_plus", [MODELS[0]] * 2, BASE), MODELS[0], atol=1e-6)
    np.testing.assert_allclose(run("ram_plus", MODELS[:1], BASE), MODELS[0], atol=1e-6)


def test_mergekits_name_is_known():
    assert lookup("ramplus_tl") is lookup("ram_plus")
