"""AdaRank with given components against a naive version."""

import numpy as np
import pytest
import torch

import merganser as mg


def experts(count=3, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"w": (7, 5), "kernel": (4, 3, 2), "bias": (6,), "scale": ()}
    base = {n: np.float32(rng.standard_normal(s)) for n, s in shapes.items()}
    models = [{n: np.float32(v + rng.standard_normal(v.shape)) for n, v in base.items()} for _ in range(count)]
    sizes = {"w": 5, "kernel": 4, "bias": 1, "scale": 1}
    chosen = [{n: (0.4 * rng.integers(0, 2, size)).astype(np.float32) for n, size in sizes.items()} for _ in models]
    return base, models, chosen


def tensors(state):
    return {n: torch.from_numpy(np.asarray(v)) for n, v in state.items()}


def test_components_are_selected():
    base, models, chosen = experts()
    found = mg.merge(
        [tensors(m) for m in models], "adarank", tensors(base), statistics={"components": [tensors(c) for c in chosen]}
    )
    for name, start in base.items():
        wanted = start.astype(np.float64)
        for model, factors in zip(models, chosen, strict=True):
            delta = model[name].astype(np.float64) - start
            if start.ndim < 2:
                wanted = wanted + factors[name] * delta
                continue
            u, s, vt = np.linalg.svd(delta.reshape(len(delta), -1), full_matrices=False)
            wanted = wanted + ((u * s * factors[name]) @ vt).reshape(start.shape)
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_all_components_or_none(factor):
    """All of them make task arithmetic, none of them the base."""
    base, models, chosen = experts()
    same = [{n: np.full_like(v, factor) for n, v in each.items()} for each in chosen]
    statistics = {"components": [tensors(c) for c in same]}
    found = mg.merge([tensors(m) for m in models], "adarank", tensors(base), statistics=statistics)
    wanted = mg.merge([tensors(m) for m in models], "task_arithmetic", tensors(base), scale=factor)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


def test_tensors_without_components_are_added():
    base, models, chosen = experts()
    some = {"components": [tensors({"w": each["w"]}) for each in chosen]}
    found = mg.merge([tensors(m) for m in models], "adarank", tensors(base), statistics=some, otherwise=0.3)
    wanted = base["bias"] + 0.3 * sum(m["bias"] - base["bias"] for m in models)
    np.testing.assert_allclose(found["bias"], wanted, rtol=1e-5, atol=1e-6)
