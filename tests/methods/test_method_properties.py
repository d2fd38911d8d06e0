"""What holds for every method that is registered, whatever it computes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from method_driver import run

from merganser.methods.registry import parameters, registry

METHODS = [name for name, method in registry().items() if not method.statistics]
STREAMED = [name for name in METHODS if registry()[name].reach != "whole"]
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])

shapes = st.sampled_from([(), (1,), (5,), (0,), (1, 1), (6, 4), (3, 1), (1, 7), (0, 3), (4, 2, 3), (3, 2, 2, 2)])
coarse = st.integers(-3, 3).map(lambda n: n / 4)
fine = st.floats(-2, 2, width=32)


@st.composite
def inputs(draw, method, cells=None):
    """A base (where the method has one) and models around it, often with equal and zero task vectors."""
    rule = registry()[method]
    shape = draw(shapes)
    low, high = rule.models
    if method == "slerp":
        high = 1
    count = draw(st.integers(low, int(min(high, 4))))
    if cells is None:
        cells = draw(st.sampled_from([coarse, fine]))
    draws = [draw(arrays.arrays(np.float32, shape, elements=cells)) for _ in range(count + 1)]
    base = None if rule.base == "none" else draws[0]
    return [np.asarray(d) for d in draws[1:]], base


def required(method):
    return {name: 0.5 for name, p in parameters(registry()[method]).items() if p.required}


@pytest.mark.parametrize("method", METHODS)
@QUICK
@given(st.data())
def test_output_is_finite_and_inputs_stay(method, data):
    models, base = data.draw(inputs(method))
    before = [m.copy() for m in models], None if base is None else base.copy()
    merged = run(method, models, base, parameters=required(method))
    assert tuple(merged.shape) == models[0].shape
    assert merged.dtype == torch.float32
    assert torch.isfinite(merged).all()
    for array, copy in zip(models, before[0], strict=True):
        np.testing.assert_array_equal(array, copy)
    if base is not None:
        np.testing.assert_array_equal(base, before[1])


@pytest.mark.parametrize("method", STREAMED)
@QUICK
@given(st.data())
def test_blocks_change_no_bit(method, data):
    models, base = data.draw(inputs(method))
    rows = models[0].shape[0] if models[0].shape else 1
    step = data.draw(st.integers(1, max(1, rows)))
    whole = run(method, models, base, parameters=required(method))
    cut = run(method, models, base, step=step, parameters=required(method))
    if registry()[method].reach == "elementwise":
        assert torch.equal(whole, cut)
    else:  # partial sums follow the cut, which is a function of the shape; see also the test of order below
        np.testing.assert_allclose(whole, cut, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", [m for m in STREAMED if m not in {"ema", "slerp", "wsm"}])
@QUICK
@given(st.data())
def test_order_of_models_changes_rounding_only(method, data):
    # Coarse values: sums are exact, so that no vote is decided by rounding.
    models, base = data.draw(inputs(method, coarse))
    if method == "karcher":  # a mean of directions that almost cancel is ill-conditioned
        norms = [max(1e-30, float(np.linalg.norm(m))) for m in models]
        assume(np.linalg.norm(sum(m / n for m, n in zip(models, norms, strict=True))) > 1e-3)
    labels = [f"m{i}" for i in range(len(models))]
    merged = run(method, models, base, parameters=required(method), labels=labels)
    backwards = run(method, models[::-1], base, parameters=required(method), labels=labels[::-1])
    np.testing.assert_allclose(merged, backwards, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in {"nearswap", "arcee_fusion"}])
@QUICK
@given(st.data())
def test_untouched_models_give_the_base(method, data):
    """All task vectors zero: the base comes back; rules without a base return the one model there is."""
    rule = registry()[method]
    models, base = data.draw(inputs(method))
    same = models[0] if base is None else base
    if method == "passthrough":
        models = models[:1]
    merged = run(method, [same] * len(models), base, parameters=required(method))
    if rule.base == "required" or method in {"linear", "ema", "passthrough", "wsm"}:
        np.testing.assert_array_equal(merged, same)
    else:
        np.testing.assert_allclose(merged, same, rtol=1e-5, atol=1e-5)


#: Means of some kind: identical models must come back, whatever the base.
MEANS = {
    "linear": {},
    "ema": {},
    "wsm": {},
    "nuslerp": {},
    "multislerp": {},
    "karcher": {},
    "task_arithmetic": {"normalize": True},
    "dare_linear": {"density": 1.0, "normalize": True},
    "della": {"density": 1.0},
    "breadcrumbs": {"density": 1.0, "normalize": True},
    "ties": {"density": 1.0},
    "magmax": {},
    "emr": {},
    "model_stock": {},
    "sce": {},
    "ram": {"epsilon": 0.0},
    "ram_plus": {"epsilon": 0.0},
    "wise_ft": {"alpha": 1.0},
}


@pytest.mark.parametrize("method", MEANS)
@QUICK
@given(st.data())
def test_identical_models_give_that_model(method, data):
    models, base = data.draw(inputs(method))
    merged = run(method, [models[0]] * len(models), base, parameters=MEANS[method])
    np.testing.assert_allclose(merged, models[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("method", [m for m in STREAMED if "density" in parameters(registry()[m])])
@QUICK
@given(st.data())
def test_density_zero_is_the_base(method, data):
    models, base = data.draw(inputs(method))
    np.testing.assert_array_equal(run(method, models, base, parameters={"density": 0.0}), base)


@pytest.mark.parametrize("method", [m for m in STREAMED if registry()[m].reach == "reduce_map"])
def test_order_of_blocks_changes_no_bit(method):
    """The driver maps blocks in a shuffled order; a reversed one must give the same state and the same bits."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((40, 30)).astype(np.float32)
    count = 1 if method == "slerp" else int(min(2, registry()[method].models[1]))
    models = [base + 0.1 * rng.standard_normal(base.shape).astype(np.float32) for _ in range(count)]
    given = None if registry()[method].base == "none" else base
    merged = [run(method, models, given, step=7, parameters=required(method), shuffle=s) for s in (0, 1, 2)]
    assert all(torch.equal(merged[0], other) for other in merged[1:])


@pytest.mark.parametrize("method", METHODS)
def test_memory_layout_does_not_matter(method):
    rng = np.random.default_rng(1)
    base = torch.from_numpy(rng.standard_normal((12, 6)).astype(np.float32))
    count = 1 if method == "slerp" else int(min(2, registry()[method].models[1]))
    models = [base + 0.1 * torch.from_numpy(rng.standard_normal((12, 6)).astype(np.float32)) for _ in range(count)]
    given = None if registry()[method].base == "none" else base
    turned = [m.t().contiguous().t() for m in models]
    merged = run(method, models, given, parameters=required(method))
    other = run(method, turned, None if given is None else given.t().contiguous().t(), parameters=required(method))
    np.testing.assert_allclose(merged, other, rtol=1e-4, atol=1e-5)


def test_methods_take_the_numbers_of_models_they_say():
    for name, method in registry().items():
        low, high = method.models
        assert low >= 1
        assert high >= low
        assert high == math.inf or isinstance(high, int), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(6, 4), (5,)])
def test_what_a_method_makes_is_where_its_inputs_are(method, shape):
    """Tensors made without a device would be on the default one, here one that nothing can be computed with."""
    rule = registry()[method]
    count = 1 if method == "slerp" else int(min(rule.models[1], 3))
    models = [torch.randn(shape) for _ in range(count)]
    base = None if rule.base == "none" else torch.randn(shape)
    for switched in _switches(method):
        with torch.device("meta"):
            merged = run(method, models, base, step=2, parameters=required(method) | switched)
        assert merged.device.type == "cpu"


def _switches(method):
    """The defaults, and every parameter that chooses between ways set to each of the others."""
    found = [{}]
    for name, parameter in parameters(registry()[method]).items():
        if parameter.choices:
            found += [{name: choice} for choice in parameter.choices]
        elif isinstance(parameter.default, bool):
            found.append({name: not parameter.default})
    return [*found, {"flatten": False, "row_wise": True}] if method == "nuslerp" else found
