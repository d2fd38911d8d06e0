import math

import numpy as np
import pytest
import torch
from method_driver import run

import merganser as mg
from merganser.errors import RecipeError
from merganser.methods.averages import between

rng = np.random.default_rng(0)
BASE = rng.standard_normal((9, 5)).astype(np.float32)
MODELS = [BASE + 0.1 * rng.standard_normal((9, 5)).astype(np.float32) for _ in range(3)]


def test_linear_is_a_weighted_mean():
    weight = [0.5, 2.0, 0.0]
    expected = np.average(np.stack(MODELS), axis=0, weights=weight)
    np.testing.assert_allclose(run("linear", MODELS, parameters={"weight": weight}), expected, atol=1e-6)


def test_linear_by_default_is_the_uniform_soup():
    np.testing.assert_allclose(run("linear", MODELS), np.mean(MODELS, axis=0), atol=1e-6)


def test_linear_with_negative_weights_and_without_normalisation():
    weight = [1.0, -0.5, 1.5]
    expected = sum(w * m for w, m in zip(weight, MODELS, strict=True))
    np.testing.assert_allclose(run("linear", MODELS, parameters={"weight": weight}), expected / 2, atol=1e-6)
    merged = run("linear", MODELS, parameters={"weight": weight, "normalize": False})
    np.testing.assert_allclose(merged, expected, atol=1e-6)


def test_equal_models_come_back_bit_by_bit():
    merged = run("linear", [MODELS[0]] * 3, parameters={"weight": [0.1, 0.7, 0.3]})
    assert torch.equal(merged, torch.from_numpy(MODELS[0]))


INFINITE = [[-math.inf, -math.inf, 3.0, math.inf, math.nan, 1.0], [-math.inf, 3.0, -math.inf, -math.inf, 1.0, 2.0]]


@pytest.mark.parametrize("weight", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_infinite_entries_are_averaged_as_numbers_are(weight):
    start, end = map(torch.tensor, INFINITE)
    found = between(start, end, weight, finite=False)
    shares = [(tensor, share) for tensor, share in ((start, 1 - weight), (end, weight)) if share]
    expected = sum(tensor * share for tensor, share in shares)
    assert torch.allclose(found, expected, equal_nan=True)
    assert torch.equal(found[5:], between(start[5:], end[5:], weight))


@pytest.mark.parametrize(
    ("method", "options"), [("linear", {"weight": [0.1, 0.7, 0.3]}), ("ema", {}), ("wise_ft", {}), ("fisher", {})]
)
def test_masks_of_infinity_come_back_bit_by_bit(method, options):
    mask = torch.full((4, 4), -math.inf).triu(1)
    count = 1 if method == "wise_ft" else 3
    if method == "wise_ft":
        options = {"base": {"mask": mask}}
    if method == "fisher":
        options = {"statistics": {"fisher": [{"other": mask}] * count}}
    merged = mg.merge([{"mask": mask}] * count, method, allow_nan=True, **options)
    assert torch.equal(merged["mask"], mask)


def test_weights_that_cancel_are_refused_before_any_work():
    for weight in ([1, -1, 0], [0.1, 0.2, -0.3], [1e9, -1e9, 1e-3]):
        with pytest.raises(RecipeError, match="sum to zero"):
            run("linear", MODELS, parameters={"weight": weight})


def test_small_weights_do_not_cancel():
    merged = run("linear", MODELS, parameters={"weight": [1e-12, 2e-12, -1e-12]})
    np.testing.assert_allclose(merged, (MODELS[0] + 2 * MODELS[1] - MODELS[2]) / 2, atol=1e-6)


def test_wise_ft():
    for alpha in (0.0, 0.3, 1.0):
        merged = run("wise_ft", MODELS[:1], BASE, parameters={"alpha": alpha})
        np.testing.assert_allclose(merged, (1 - alpha) * BASE + alpha * MODELS[0], atol=1e-6)


def test_ema():
    expected = MODELS[0]
    for model in MODELS[1:]:
        expected = 0.8 * expected + 0.2 * model
    np.testing.assert_allclose(run("ema", MODELS, parameters={"decay": 0.8}), expected, atol=1e-6)


def test_passthrough():
    np.testing.assert_array_equal(run("passthrough", MODELS[:1]), MODELS[0])
    np.testing.assert_array_equal(run("passthrough", MODELS[:1], parameters={"scale": 0.5}), MODELS[0] * 0.5)


def test_passthrough_takes_one_model():
    with pytest.raises(RecipeError, match="expected 1 model"):
        run("passthrough", MODELS)
