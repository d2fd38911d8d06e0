"""OPCM against a naive float64 version with full singular bases."""

import numpy as np
import pytest
import torch

import merganser as mg
from merganser.methods.opcm import project

SHAPES = {"a.weight": (14, 9), "b.weight": (8, 20), "c.bias": (6,)}


def experts(count, seed=0):
    rng = np.random.default_rng(seed)
    base = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    sizes = np.linspace(0.5, 2, count)
    return base, [
        {n: v + 0.1 * size * rng.standard_normal(v.shape).astype(np.float32) for n, v in base.items()} for size in sizes
    ]


def projected(delta, merged, share):
    u, s, vt = np.linalg.svd(merged)
    k = int(np.argmax(np.cumsum(s) >= share * s.sum() - 1e-12)) + 1
    inside = u.T @ delta @ vt.T
    np.fill_diagonal(inside, 0)
    inside[:k, :k] = 0
    return u @ inside @ vt


def naive(base, models, share=0.5, scope="global"):
    deltas = [{n: m[n].astype(np.float64) - base[n] for n in base} for m in models]
    total = deltas[0]
    for delta in deltas[1:]:
        total = {n: total[n] + (projected(delta[n], total[n], share) if delta[n].ndim == 2 else delta[n]) for n in base}
    groups = [list(base)] if scope == "global" else [[n] for n in base]
    found = {}
    for names in groups:
        norm = lambda state: np.sqrt(sum((state[n] ** 2).sum() for n in names))  # noqa: B023, E731
        factor = np.mean([norm(d) for d in deltas]) / norm(total)
        found |= {n: base[n] + factor * total[n] for n in names}
    return found


def tensors(state):
    return {n: torch.from_numpy(v) for n, v in state.items()}


@pytest.mark.parametrize("count", [1, 2, 5, 12])
@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_formulas(count, scope, share):
    base, models = experts(count)
    found = mg.merge([tensors(m) for m in models], "opcm", tensors(base), scope=scope, share=share)
    for name, value in naive(base, models, share, scope).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


def test_order_matters_and_identical_experts_come_back():
    base, models = experts(3)
    forth, back = (mg.merge([tensors(m) for m in each], "opcm", tensors(base)) for each in (models, models[::-1]))
    assert not torch.allclose(forth["a.weight"], back["a.weight"], atol=1e-3)
    same = mg.merge([tensors(models[0])] * 4, "opcm", tensors({n: base[n] for n in base}))
    for name in ("a.weight", "b.weight"):
        delta, wanted = same[name] - tensors(base)[name], tensors(models[0])[name] - tensors(base)[name]
        assert torch.nn.functional.cosine_similarity(delta.flatten(), wanted.flatten(), dim=0) > 1 - 1e-6


def test_projections_are_orthogonal():
    generator = torch.Generator().manual_seed(0)
    merged, delta = (torch.randn(9, 14, generator=generator, dtype=torch.float64) for _ in range(2))
    found = project(delta, merged, 0.5)
    assert abs(float((found * merged).sum())) < 1e-10
    assert torch.equal(project(delta, torch.zeros_like(merged), 0.5), delta)
