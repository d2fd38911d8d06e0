import json

import numpy as np
import pytest
import torch
from method_driver import RowBlocks, make_group, run

from merganser.methods.consensus import weighted_sum_
from merganser.methods.registry import build, lookup

rng = np.random.default_rng(2)
SHAPE = (11, 8)
BASE = rng.standard_normal(SHAPE).astype(np.float32)
MODELS = [BASE + 0.1 * rng.standard_normal(SHAPE).astype(np.float32) for _ in range(3)]
#: As from bfloat16 checkpoints: many equal magnitudes, many zeros, entries that cancel exactly.
COARSE = [np.round(BASE * 64) / 64 + np.round(rng.standard_normal(SHAPE)).astype(np.float32) / 64 for _ in range(3)]


def top(delta, density, gamma=0.0):
    """Ranks from the largest on; the first of equals first."""
    n = delta.size
    keep = max(1, int(density * n)) if density else 0
    skip = min(int(gamma * n), n - keep)
    ranked = np.lexsort((np.arange(n), -np.abs(delta.ravel())))[skip : skip + keep]
    mask = np.zeros(n, bool)
    mask[ranked] = True
    return np.where(mask.reshape(delta.shape), delta, 0)


def elected(deltas, weights, normalize):
    weighted = np.stack([w * d for w, d in zip(weights, deltas, strict=True)]).astype(np.float64)
    sign = np.where(weighted.sum(0) >= 0, 1, -1)
    agree = np.sign(weighted) == sign
    total = (weighted * agree).sum(0)
    if normalize:
        mass = (np.array(weights).reshape(-1, 1, 1) * agree).sum(0)
        total = total / np.where(mass == 0, 1, mass)
    return total


def test_task_arithmetic():
    weight = [0.5, 1.0, -0.25]
    expected = BASE + 0.8 * sum(w * (m - BASE) for w, m in zip(weight, MODELS, strict=True))
    parameters = {"weight": weight, "scale": 0.8}
    np.testing.assert_allclose(run("task_arithmetic", MODELS, BASE, parameters=parameters), expected, atol=1e-6)
    merged = run("task_arithmetic", MODELS, BASE, parameters={**parameters, "normalize": True})
    np.testing.assert_allclose(merged, BASE + (expected - BASE) / 1.25, atol=1e-6)


@pytest.mark.parametrize(
    ("weight", "divisor"), [([0.1, 0.2, -0.3], 1), ([1e-9, 2e-9, 0], 3e-9), ([0, 0, 0], 1), ([1, 2, 0], 3)]
)
def test_a_sum_is_divided_unless_the_weights_cancel(weight, divisor):
    tensors = [torch.full((2,), float(i)) for i in (1, 2, 4)]
    expected = sum(w * i for w, i in zip(weight, (1, 2, 4), strict=True)) / divisor
    merged = weighted_sum_(tensors, weight, normalize=True)
    torch.testing.assert_close(merged, torch.full((2,), expected))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("weight", [[0.8, 0.8, 0.1], [0.1, 0.7, 0.7], [0.3, 0.0, 0.3]])
def test_opposite_votes_of_equal_weight_elect_the_positive_sign(weight, normalize):
    delta = rng.standard_normal(SHAPE).astype(np.float32)
    largest = max(weight)
    signs = iter((1, -1))
    deltas = [next(signs) * delta if each == largest else np.zeros_like(delta) for each in weight]
    parameters = {"weight": weight, "density": 1.0, "normalize": normalize}
    merged = run("ties", deltas, np.zeros_like(delta), parameters=parameters)
    np.testing.assert_allclose(merged, np.abs(delta) * (1 if normalize else largest), rtol=1e-6)


def test_untouched_tensors_stay_as_they_are():
    merged = run("task_arithmetic", [BASE, BASE], BASE, parameters={"weight": [0.3, 0.7]})
    assert torch.equal(merged, torch.from_numpy(BASE))


def test_lines_grows_with_depth():
    total = sum(m - BASE for m in MODELS)
    for depth in (0.0, 0.5, 1.0):
        merged = run("lines", MODELS, BASE, parameters={"scale": 0.2, "gain": 0.6, "depth": depth})
        np.testing.assert_allclose(merged, BASE + (0.2 + 0.6 * depth) * total, atol=1e-6)


@pytest.mark.parametrize("step", [None, 1, 4])
@pytest.mark.parametrize("models", [MODELS, COARSE])
@pytest.mark.parametrize("weight", [[1.0, 1.0, 1.0], [0.5, 2.0, 1.0], [1.0, -0.5, 0.0]])
@pytest.mark.parametrize("density", [[0.2, 0.5, 0.9], [0.0, 1.0, 0.3]])
def test_ties(models, weight, density, step):
    base = BASE if models is MODELS else (np.round(BASE * 64) / 64).astype(np.float32)
    deltas = [top(m - base, d) for m, d in zip(models, density, strict=True)]
    for normalize in (True, False):
        merged = run(
            "ties",
            models,
            base,
            step=step,
            parameters={"weight": weight, "density": density, "normalize": normalize, "scale": 0.7},
        )
        np.testing.assert_allclose(merged, base + 0.7 * elected(deltas, weight, normalize), atol=1e-6)


def test_ties_can_restore_the_norm():
    deltas = [top(m - BASE, 0.3) for m in MODELS]
    deltas = [d * np.abs(m - BASE).sum() / np.abs(d).sum() for d, m in zip(deltas, MODELS, strict=True)]
    merged = run("ties", MODELS, BASE, step=3, parameters={"density": 0.3, "rescale": True})
    np.testing.assert_allclose(merged, BASE + elected(deltas, [1, 1, 1], True), atol=1e-6)


@pytest.mark.parametrize("step", [None, 4])
@pytest.mark.parametrize("gamma", [0.0, 0.001, 0.1, 0.9])
@pytest.mark.parametrize("density", [0.0, 0.3, 0.9, 1.0])
def test_breadcrumbs(gamma, density, step):
    deltas = [top(m - BASE, density, gamma) for m in MODELS]
    parameters = {"density": density, "gamma": gamma}
    merged = run("breadcrumbs", MODELS, BASE, step=step, parameters=parameters)
    np.testing.assert_allclose(merged, BASE + sum(deltas), atol=1e-6)
    merged = run("breadcrumbs_ties", MODELS, BASE, step=step, parameters=parameters)
    np.testing.assert_allclose(merged, BASE + elected(deltas, [1, 1, 1], False), atol=1e-6)


def test_ties_over_the_whole_model():
    scales = {"a.weight": 1.0, "b.weight": 0.01, "c.bias": 10.0}
    tensors = {name: make_group([BASE + s * (m - BASE) for m in MODELS], BASE, name=name) for name, s in scales.items()}
    method = build(lookup("ties"), {"density": 0.4, "scope": "global"}, ["m0", "m1", "m2"])
    assert method.needs_preparation()
    prepared = method.prepare(({"density": [0.4] * 3}, RowBlocks(group, 3)) for group in tensors.values())
    prepared = json.loads(json.dumps(prepared))
    whole = [np.stack([g.models[t].numpy() - BASE for g in tensors.values()]) for t in range(3)]
    trimmed = [top(delta, 0.4) for delta in whole]
    for i, (name, group) in enumerate(tensors.items()):
        merged = run(
            "ties",
            group.models,
            BASE,
            step=2,
            parameters={"density": 0.4, "scope": "global"},
            name=name,
            prepared=prepared,
        )
        expected = BASE + elected([t[i] for t in trimmed], [1, 1, 1], True)
        np.testing.assert_allclose(merged, expected, atol=1e-5)


def large(n=(64, 4096)):
    base = torch.zeros(n)
    return base, [torch.from_numpy(np.random.default_rng(t).standard_normal(n).astype(np.float32)) for t in range(2)]


@pytest.mark.parametrize("method", ["dare_linear", "della_linear"])
@pytest.mark.parametrize("density", [0.1, 0.5, 0.85])
def test_random_drops_keep_the_density_and_the_mean(method, density):
    base, (model, _) = large()
    merged = run(method, [model], base, step=5, parameters={"density": density})
    kept = merged != 0
    assert kept.float().mean().item() == pytest.approx(density, abs=0.005)
    assert float((merged * model).sum() / (model * model).sum()) == pytest.approx(1, abs=0.05)
    if method == "dare_linear":  # by the probability they had, a multiple of 2⁻¹⁶
        np.testing.assert_allclose(merged[kept], (model * 2**16 / round(density * 2**16))[kept], rtol=1e-6)


def test_the_smallest_density_keeps_one_entry_in_65536():
    base, (model, _) = large((512, 4096))
    merged = run("dare_linear", [model], base, step=64, parameters={"density": 1e-9})
    assert 10 < (merged != 0).sum() < 70
    np.testing.assert_allclose(merged[merged != 0], model[merged != 0] * 2**16, rtol=1e-6)


def test_draws_belong_to_seed_tensor_and_model_not_to_order():
    base, models = large((8, 64))
    both = run("dare_linear", models, base, labels=["x", "y"])
    swapped = run("dare_linear", models[::-1], base, labels=["y", "x"])
    np.testing.assert_allclose(both, swapped, atol=1e-6)
    for change in ({"seed": 1}, {"name": "other"}, {"labels": ["x", "z"]}):
        assert not torch.equal(both, run("dare_linear", models, base, **{"labels": ["x", "y"], **change}))


def test_della_keeps_large_entries_more_often():
    base, (model, _) = large()
    model = model.bfloat16().float()  # magnitudes that ranks tell apart
    density, epsilon = 0.4, 0.3
    merged = run("della_linear", [model], base, parameters={"density": density, "epsilon": epsilon})
    order = model.abs().argsort(dim=1, stable=True)
    kept = (merged != 0).float().gather(1, order).mean(0)
    chance = torch.linspace(density - epsilon, density + epsilon, model.shape[1])
    assert (kept.view(16, -1).mean(1) - chance.view(16, -1).mean(1)).abs().max() < 0.05
    ratio = (merged / model).gather(1, order)
    np.testing.assert_allclose(ratio[ratio != 0], (1 / chance).expand_as(ratio)[ratio != 0], rtol=1e-4)


@pytest.mark.parametrize("shape", [(), (1,), (97,), (5, 7, 3, 3), (3, 40, 16)])
@pytest.mark.parametrize("density", [0.0, 0.05, 0.5, 1.0])
def test_della_at_its_ends(shape, density):
    base = torch.zeros(shape)
    model = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    merged = run("della", [model], base, parameters={"density": density, "epsilon": 0.15})
    assert torch.isfinite(merged).all()
    if density == 0:
        assert not merged.any()
    if density == 1:
        np.testing.assert_allclose(merged, model, rtol=1e-6)


def test_density_one_is_task_arithmetic():
    expected = run("task_arithmetic", MODELS, BASE)
    for method in ("dare_linear", "della_linear", "breadcrumbs"):
        np.testing.assert_allclose(run(method, MODELS, BASE, parameters={"density": 1.0}), expected, atol=1e-6)


def test_float64_is_kept():
    models = [m.astype(np.float64) for m in MODELS]
    for method in ("ties", "dare_ties", "della", "breadcrumbs"):
        assert run(method, models, BASE.astype(np.float64), step=3).dtype == torch.float64
