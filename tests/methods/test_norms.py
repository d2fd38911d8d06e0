"""`norms: equal`: every task vector at the geometric mean of the norms, whatever the method."""

import numpy as np
import pytest
import torch
from method_driver import run

import merganser as mg
from merganser.methods.norms import TaskVectorMethod
from merganser.methods.registry import parameters, registry

METHODS = [name for name, m in registry().items() if issubclass(m, TaskVectorMethod) and not m.statistics]
#: The basis of Core Space is arbitrary for experts of full rank; sums do not depend on it.
SETTINGS = {"core_space": {"inner": "task_arithmetic"}}
LENGTHS = (0.1, 1.0, 20.0)


def experts(shapes, seed=0):
    rng = np.random.default_rng(seed)
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    found = [
        {name: value + length * rng.standard_normal(value.shape).astype(np.float32) for name, value in base.items()}
        for length in LENGTHS
    ]
    return base, found


def tensors(state):
    return {name: torch.from_numpy(value) for name, value in state.items()}


def equalised(base, models):
    """The models moved to the common norm, in float64."""
    norms = [np.sqrt(sum(((m[n] - b).astype(np.float64) ** 2).sum() for n, b in base.items())) for m in models]
    common = np.exp(np.mean(np.log(norms)))
    return [
        {n: (b + common / norm * (m[n].astype(np.float64) - b)).astype(np.float32) for n, b in base.items()}
        for m, norm in zip(models, norms, strict=True)
    ]


@pytest.mark.parametrize("method", METHODS)
def test_equal_norms_are_those_of_scaled_experts(method):
    """The norm is that of the whole model: tensors keep their share of it."""
    base, models = experts({"a.weight": (24, 20), "b.weight": (7, 30), "c.bias": (9,)})
    settings = SETTINGS.get(method, {})
    found = mg.merge([tensors(m) for m in models], method, tensors(base), norms="equal", **settings)
    wanted = mg.merge([tensors(m) for m in equalised(base, models)], method, tensors(base), **settings)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-3)


def test_equal_experts_are_not_touched():
    base, models = experts({"w": (40, 30)})
    models = [models[0]] * 3
    kept = mg.merge([tensors(m) for m in models], "task_arithmetic", tensors(base))
    equal = mg.merge([tensors(m) for m in models], "task_arithmetic", tensors(base), norms="equal")
    torch.testing.assert_close(equal["w"], kept["w"], rtol=1e-6, atol=1e-6)


def test_an_expert_that_did_not_move_counts_for_nothing():
    base, models = experts({"w": (40, 30)})
    found = run("task_arithmetic", [base["w"], models[2]["w"]], base["w"], parameters={"norms": "equal"})
    np.testing.assert_allclose(found, models[2]["w"], rtol=1e-5, atol=1e-5)


def test_compiled_and_torch_agree_on_large_tensors(monkeypatch):
    base, models = experts({"w": (300, 200)})
    given = [tensors(m) for m in models], "ties", tensors(base)
    compiled = mg.merge(*given, norms="equal", density=0.3)
    monkeypatch.setattr("merganser.engine.fused.is_possible", lambda *_: False)
    plain = mg.merge(*given, norms="equal", density=0.3)
    torch.testing.assert_close(compiled["w"], plain["w"], rtol=1e-6, atol=1e-6)


def test_one_place_declares_it():
    assert all("norms" in parameters(registry()[name]) for name in METHODS)
    assert all("norms" not in vars(registry()[name]).get("__annotations__", {}) for name in METHODS)
