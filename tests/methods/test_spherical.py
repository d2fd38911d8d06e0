import math

import numpy as np
import pytest
import torch
from method_driver import run

from merganser.errors import RecipeError

rng = np.random.default_rng(1)
BASE = rng.standard_normal((6, 4, 3)).astype(np.float32)
MODELS = [BASE + rng.standard_normal(BASE.shape).astype(np.float32) for _ in range(3)]


def slerp(a, b, t, axis=None):
    a, b = a.astype(np.float64), b.astype(np.float64)
    norms = np.sqrt((a * a).sum(axis, keepdims=True) * (b * b).sum(axis, keepdims=True))
    angle = np.arccos((a * b).sum(axis, keepdims=True) / norms)
    return (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)


@pytest.mark.parametrize("step", [None, 1, 4])
def test_slerp(step):
    for t in (0.0, 0.3, 1.0):
        expected = slerp(BASE, MODELS[0], t)
        merged = run("slerp", MODELS[:1], BASE, step=step, parameters={"t": t})
        np.testing.assert_allclose(merged, expected, atol=1e-6)
        merged = run("slerp", [BASE, MODELS[0]], step=step, parameters={"t": t})
        np.testing.assert_allclose(merged, expected, atol=1e-6)


def test_slerp_is_linear_between_near_parallels():
    near = (BASE * 3 + 1e-3).astype(np.float32)
    merged = run("slerp", [near], BASE, parameters={"t": 0.3})
    np.testing.assert_allclose(merged, 0.7 * BASE + 0.3 * near, atol=1e-6)


@pytest.mark.parametrize(("models", "base"), [(MODELS[:1], None), (MODELS[:2], BASE), (MODELS, None)])
def test_slerp_is_between_two(models, base):
    with pytest.raises(RecipeError, match="expected a base and one model, or two models"):
        run("slerp", models, base, parameters={"t": 0.5})


@pytest.mark.parametrize("step", [None, 1, 4])
@pytest.mark.parametrize(
    ("parameters", "axis"), [({}, None), ({"flatten": False}, -1), ({"flatten": False, "row_wise": True}, 0)]
)
def test_nuslerp(parameters, axis, step):
    parameters = {"weight": [1.0, 3.0], **parameters}
    merged = run("nuslerp", MODELS[:2], step=step, parameters=parameters)
    np.testing.assert_allclose(merged, slerp(MODELS[0], MODELS[1], 0.75, axis), atol=1e-5)
    merged = run("nuslerp", MODELS[:2], BASE, step=step, parameters=parameters)
    expected = BASE + slerp(MODELS[0] - BASE, MODELS[1] - BASE, 0.75, axis)
    np.testing.assert_allclose(merged, expected, atol=1e-5)


def test_nuslerp_of_equal_rows_is_linear_there():
    other = MODELS[1].copy()
    other[2] = 2 * MODELS[0][2]
    merged = run("nuslerp", [MODELS[0], other], parameters={"flatten": False})
    np.testing.assert_allclose(merged[2], 1.5 * MODELS[0][2], atol=1e-6)
    assert torch.isfinite(merged).all()


def test_multislerp():
    weight = np.array([0.2, 0.5, 0.3])
    for base in (None, BASE):
        points = np.stack([(m - base if base is not None else m).ravel() for m in MODELS]).astype(np.float64)
        norms = np.linalg.norm(points, axis=1)
        mean = (weight / norms) @ points
        expected = (mean / np.linalg.norm(mean) * (weight @ norms)).reshape(BASE.shape)
        merged = run("multislerp", MODELS, base, step=4, parameters={"weight": (2 * weight).tolist()})
        np.testing.assert_allclose(merged, expected + (0 if base is None else base), atol=1e-5)


@pytest.mark.parametrize("weight", [0.5, -0.5, 2.0, 0.0])
def test_multislerp_of_one_model_has_its_weight(weight):
    def merged(models, weights, **parameters):
        return run("multislerp", models, BASE, parameters={"weight": weights, **parameters})

    expected = BASE + abs(weight) * (MODELS[0] - BASE)
    np.testing.assert_allclose(merged(MODELS[:1], [weight], normalize=False), expected, atol=1e-6)
    np.testing.assert_allclose(merged(MODELS[:2], [weight, 0], normalize=False), expected, atol=1e-5)
    if weight:
        np.testing.assert_allclose(merged(MODELS[:1], [weight]), MODELS[0], atol=1e-6)


def test_karcher():
    points = np.stack([m.ravel() for m in MODELS]).astype(np.float64)
    norms = np.linalg.norm(points, axis=1)
    units = points / norms[:, None]
    u = units.mean(0) / np.linalg.norm(units.mean(0))
    for _ in range(10):
        angles = np.arccos(units @ u)
        step = np.mean([a / math.sin(a) * (v - math.cos(a) * u) for a, v in zip(angles, units, strict=True)], axis=0)
        size = np.linalg.norm(step)
        u = math.cos(size) * u + math.sin(size) * step / size
    merged = run("karcher", MODELS, step=4, parameters={"tolerance": 0.0})
    np.testing.assert_allclose(merged, (u * norms.mean()).reshape(BASE.shape), atol=1e-5)


def test_multislerp_refuses_weights_that_cancel_up_to_rounding():
    with pytest.raises(RecipeError, match="sum to zero"):
        run("multislerp", MODELS, parameters={"weight": [0.1, 0.2, -0.3]})


@pytest.mark.parametrize("method", ["multislerp", "karcher", "linear"])
def test_weights_that_cancel_are_refused(method):
    with pytest.raises(RecipeError):
        run(method, MODELS[:2], parameters={"weight": [0, 0]})
