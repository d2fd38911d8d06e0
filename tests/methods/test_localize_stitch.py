"""Localize-and-Stitch against a naive version."""

import numpy as np
import pytest
import torch
from method_driver import run

import merganser as mg


def experts(count, shapes=((12, 10), (30,)), seed=0):
    rng = np.random.default_rng(seed)
    base = {str(i): rng.standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)}
    models = [
        {n: v + (1 + 3 * int(n)) * 0.1 * rng.standard_normal(v.shape).astype(np.float32) for n, v in base.items()}
        for _ in range(count)
    ]
    return base, models


def naive(base, models, density):
    flat = lambda state: np.concatenate([v.ravel() for v in state.values()]).astype(np.float64)  # noqa: E731
    start = flat(base)
    merged, count = np.zeros_like(start), np.zeros_like(start)
    for model in models:
        delta = flat(model) - start
        mask = np.zeros_like(delta)
        mask[np.argsort(-np.abs(delta), kind="stable")[: max(1, int(density * delta.size))]] = 1
        merged += mask * delta
        count += mask
    return start + merged / np.maximum(count, 1)


@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("density", [0.05, 0.4, 1.0])
def test_masks_are_of_the_whole_model(count, density):
    base, models = experts(count)
    tensors = lambda state: {n: torch.from_numpy(v) for n, v in state.items()}  # noqa: E731
    found = mg.merge([tensors(m) for m in models], "localize_stitch", tensors(base), density=density)
    flat = np.concatenate([v.numpy().ravel() for v in found.values()])
    np.testing.assert_allclose(flat, naive(base, models, density), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [None, 5])
def test_masks_of_each_tensor(step):
    base, models = experts(3)
    found = run(
        "localize_stitch",
        [m["0"] for m in models],
        base["0"],
        step=step,
        parameters={"scope": "tensor", "density": 0.3},
    )
    wanted = naive({"0": base["0"]}, [{"0": m["0"]} for m in models], 0.3)
    np.testing.assert_allclose(np.asarray(found).ravel(), wanted, rtol=1e-5, atol=1e-6)
