import numpy as np
import pytest
from method_driver import run

rng = np.random.default_rng(8)
BASE = rng.standard_normal((10, 6)).astype(np.float32)
MODELS = [BASE + rng.standard_normal((10, 6)).astype(np.float32) for _ in range(4)]
DELTAS = np.stack([m - BASE for m in MODELS])


@pytest.mark.parametrize("agree", [0, 1, 2, 4])
@pytest.mark.parametrize("threshold", [0.2, 0.6, [0.2, 0.3, 0.4, 0.6]])
def test_consensus_of_tall_masks(agree, threshold):
    total = DELTAS.sum(0)
    bounds = np.broadcast_to(threshold, 4).reshape(-1, 1, 1)
    masks = np.abs(DELTAS) > bounds * np.abs(total - DELTAS)
    expected = BASE + 0.3 * total * (masks.sum(0) >= agree)
    merged = run("consensus_ta", MODELS, BASE, parameters={"threshold": threshold, "agree": agree, "scale": 0.3})
    np.testing.assert_allclose(merged, expected, atol=1e-6)


def test_one_model_agrees_with_itself():
    np.testing.assert_allclose(run("consensus_ta", MODELS[:1], BASE), MODELS[0], atol=1e-6)
