"""ESM against a naive float64 version that decomposes the outputs themselves."""

import numpy as np
import pytest
import torch

import merganser as mg
from merganser.methods.esm import essential_directions

SHAPES = {"layer.0.weight": (12, 10), "layer.1.weight": (12, 10), "other.weight": (9, 16), "layer.0.bias": (12,)}


def experts(count, seed=0, rows=50):
    rng = np.random.default_rng(seed)
    base = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    models = [
        {n: v + 0.1 * (i + 1) * rng.standard_normal(v.shape).astype(np.float32) for n, v in base.items()}
        for i in range(count)
    ]
    inputs = [
        {n: rng.standard_normal((rows, s[1])) * np.linspace(2, 0.1, s[1]) for n, s in SHAPES.items() if len(s) == 2}
        for _ in range(count)
    ]
    return base, models, inputs


def flat(matrix):
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return s.mean() * u @ vt


def naive(base, models, inputs, power):
    merged = {}
    for name in inputs[0]:
        deltas = [m[name].astype(np.float64) - base[name] for m in models]
        k = max(1, deltas[0].shape[0] // len(deltas))
        bases = [np.linalg.svd(x[name] @ d.T)[2][:k].T for x, d in zip(inputs, deltas, strict=True)]
        parts = [p.T @ d for p, d in zip(bases, deltas, strict=True)]
        sizes = np.array([np.linalg.norm(part) for part in parts])
        rows = np.concatenate([part * r for part, r in zip(parts, (sizes / sizes.mean()) ** power, strict=True)])
        columns = np.linalg.norm(rows, axis=0)
        merged[name] = flat(np.concatenate(bases, axis=1)) @ flat(rows * (columns / columns.mean()) ** power)
    layers = ["layer.0.weight", "layer.1.weight"]
    mean = np.mean([np.linalg.norm(merged[n]) for n in layers])
    for n in layers:
        merged[n] = merged[n] * (np.linalg.norm(merged[n]) / mean) ** power
    return {n: base[n] + value for n, value in merged.items()}


def tensors(state):
    return {n: torch.from_numpy(np.asarray(v)) for n, v in state.items()}


def merge(base, models, inputs, **options):
    grams = [tensors({n: (x.T @ x / len(x)).astype(np.float32) for n, x in each.items()}) for each in inputs]
    return mg.merge([tensors(m) for m in models], "esm", tensors(base), statistics={"gram": grams}, **options)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("power", [0.0, 2.0])
def test_the_formulas(count, power):
    base, models, inputs = experts(count)
    found = merge(base, models, inputs, power=power)
    for name, value in naive(base, models, inputs, power).items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-4)
    mean = np.mean([m["layer.0.bias"] for m in models], axis=0)
    np.testing.assert_allclose(found["layer.0.bias"], mean, rtol=1e-5, atol=1e-6)


def test_matrices_without_inputs_are_merged_by_tsv():
    base, models, inputs = experts(3)
    known = [{"other.weight": each["other.weight"]} for each in inputs]
    found = merge(base, models, known)
    wanted = mg.merge([tensors(m) for m in models], "tsv", tensors(base))
    torch.testing.assert_close(found["layer.0.weight"], wanted["layer.0.weight"], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found["other.weight"], wanted["other.weight"], atol=1e-2)


@pytest.mark.parametrize("count", [1, 20])
def test_ends(count):
    """A single expert, more experts than rows, experts that did not move."""
    base, models, inputs = experts(count)
    assert all(value.isfinite().all() for value in merge(base, models, inputs).values())
    still = merge(base, [base] * count, inputs)
    assert all(torch.equal(value, tensors(base)[name]) for name, value in still.items())


def test_directions_are_those_that_the_inputs_reach():
    """A change of weights that no input meets is no direction of the output."""
    delta = torch.zeros(5, 4, dtype=torch.float64)
    delta[0, 0], delta[1, 1] = 1.0, 100.0
    found = essential_directions(delta, torch.diag(torch.tensor([1.0, 0.0, 1.0, 1.0]).double()), 3)
    assert found.shape == (5, 1)
    assert abs(float(found[0, 0])) == pytest.approx(1)
