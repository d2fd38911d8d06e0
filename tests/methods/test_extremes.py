import numpy as np
from method_driver import run

rng = np.random.default_rng(3)
BASE = rng.standard_normal((7, 5)).astype(np.float32)
MODELS = [BASE + rng.standard_normal((7, 5)).astype(np.float32) for _ in range(4)]
DELTAS = np.stack([m - BASE for m in MODELS])


def test_magmax():
    chosen = np.take_along_axis(DELTAS, np.abs(DELTAS).argmax(0)[None], axis=0)[0]
    np.testing.assert_allclose(run("magmax", MODELS, BASE, parameters={"scale": 0.5}), BASE + 0.5 * chosen, atol=1e-6)


def test_magmax_of_opposites_does_not_depend_on_order():
    base = np.zeros(4, np.float32)
    models = [base + 1, base - 1]
    for order in (models, models[::-1]):
        np.testing.assert_array_equal(run("magmax", order, base), base + 1)


def test_magmax_with_weights():
    weight = np.array([1, 0, -2, 0.5])
    weighted = DELTAS * weight.reshape(-1, 1, 1)
    chosen = np.take_along_axis(weighted, np.abs(weighted).argmax(0)[None], axis=0)[0]
    merged = run("magmax", MODELS, BASE, parameters={"weight": weight.tolist()})
    np.testing.assert_allclose(merged, BASE + chosen, atol=1e-6)


def test_emr():
    sign = np.sign(DELTAS.sum(0))
    agreeing = np.where(np.sign(DELTAS) == sign, np.abs(DELTAS), 0)
    np.testing.assert_allclose(run("emr", MODELS, BASE), BASE + sign * agreeing.max(0), atol=1e-6)


def test_emr_takes_nothing_where_models_cancel():
    base = np.zeros(3, np.float32)
    np.testing.assert_array_equal(run("emr", [base + 1, base - 1], base), base)
