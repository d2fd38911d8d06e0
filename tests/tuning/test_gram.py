"""Gram statistics: against the inputs themselves, and the RegMean solution they imply against least squares."""

import pytest
import torch
from torch import nn

from merganser.errors import InputError
from merganser.tuning.gram import linear_grams
from merganser.tuning.statistics import Statistics


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)).double()


def test_grams_are_mean_outer_products():
    module, batches = mlp(), [torch.randn(n, 2, 4).double() for n in (3, 6)]
    found = linear_grams(module, batches)
    x = torch.cat(batches).reshape(-1, 4)
    hidden = torch.relu(x @ module[0].weight.T + module[0].bias)
    torch.testing.assert_close(found.tensors["0.weight"], x.T @ x / len(x))
    torch.testing.assert_close(found.tensors["3.weight"], hidden.T @ hidden / len(x))
    assert found.samples == 18
    assert module.training
    assert not any(m._forward_pre_hooks for m in module.modules())


def test_regmean_from_grams_is_the_least_squares_solution(tmp_path):
    """(Σ G_i)⁻¹ Σ G_i W_iᵀ minimises Σ_i ‖X_i Wᵀ − X_i W_iᵀ‖², here with as many rows per model."""
    models = [mlp(s) for s in range(3)]
    data = [torch.randn(20, 4).double() * (1 + s) for s in range(3)]
    grams = [
        Statistics.load(linear_grams(m, [x]).save(tmp_path / f"{i}.safetensors"), "gram").tensors["0.weight"]
        for i, (m, x) in enumerate(zip(models, data, strict=True))
    ]
    pairs = list(zip(grams, models, strict=True))
    merged = torch.linalg.solve(sum(grams), sum(g @ m[0].weight.T for g, m in pairs)).T
    targets = torch.cat([x @ m[0].weight.T for x, m in zip(data, models, strict=True)])
    expected = torch.linalg.lstsq(torch.cat(data), targets).solution.T
    torch.testing.assert_close(merged, expected, rtol=1e-8, atol=1e-10)


def test_patterns_single_layers_and_mistakes():
    module = mlp()
    x = torch.randn(5, 4).double()
    assert set(linear_grams(module, [x], include=["3"]).tensors) == {"3.weight"}
    assert set(linear_grams(nn.Linear(4, 2), [x.float()]).tensors) == {"weight"}
    half = linear_grams(nn.Linear(4, 2).bfloat16(), [x.bfloat16()])
    assert half.tensors["weight"].dtype == torch.float32
    with pytest.raises(InputError, match="no nn.Linear"):
        linear_grams(module, [x], include=["head"])
    with pytest.raises(InputError, match="no batch"):
        linear_grams(module, [])
