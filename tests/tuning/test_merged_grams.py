"""RegMean++ against a loop that merges a small network layer by layer."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import merganser as mg
from merganser.errors import InputError


@pytest.fixture
def setting():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))
    experts = {}
    for name in ("a", "b", "c"):
        experts[name] = copy.deepcopy(base)
        with torch.no_grad():
            for parameter in experts[name].parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    data = {name: [torch.randn(20, 5), torch.randn(13, 5)] for name in experts}
    return base, experts, data


def naive(experts, data, alpha):
    states = [{n: v.double().numpy() for n, v in e.state_dict().items()} for e in experts.values()]
    merged = {n: np.mean([s[n] for s in states], axis=0) for n in states[0]}
    network = copy.deepcopy(next(iter(experts.values()))).double()
    for layer in ("0", "3", "5"):
        grams = []
        network.load_state_dict({n: torch.from_numpy(v) for n, v in merged.items()})
        for batches in data.values():
            x = torch.cat(batches).double()
            with torch.no_grad():
                for name, part in network.named_children():
                    if name == layer:
                        break
                    x = part(x)
            gram = (x.T @ x / len(x)).numpy()
            grams.append(alpha * gram + (1 - alpha) * np.diag(np.diag(gram)))
        name = f"{layer}.weight"
        pull = sum(s[name] @ g for s, g in zip(states, grams, strict=True))
        merged[name] = pull @ np.linalg.inv(sum(grams))
    return merged


def test_layer_by_layer(setting):
    base, experts, data = setting
    weights, grams = mg.tuning.regmean_pp(experts, base, data, alpha=0.9)
    for name, value in naive(experts, data, 0.9).items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-3, atol=1e-4)
    assert {statistics.samples for statistics in grams.values()} == {33}


def test_the_statistics_make_the_same_merge(setting, tmp_path):
    base, experts, data = setting
    weights, grams = mg.tuning.regmean_pp(experts, base, data)
    paths = {name: str(found.save(tmp_path / f"{name}.safetensors")) for name, found in grams.items()}
    again = mg.merge(experts, "regmean", statistics={"gram": paths}, alpha=0.95)
    for name, value in again.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def test_it_differs_from_regmean_after_the_first_layer(setting):
    base, experts, data = setting
    weights, _ = mg.tuning.regmean_pp(experts, base, data)
    own = {name: mg.tuning.linear_grams(expert, data[name]).tensors for name, expert in experts.items()}
    plain = mg.merge(experts, "regmean", statistics={"gram": own}, alpha=0.95)
    torch.testing.assert_close(weights["0.weight"], plain["0.weight"], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(weights["5.weight"], plain["5.weight"], atol=1e-3)


def test_layers_that_nothing_reaches_are_an_error(setting):
    base, experts, data = setting
    with pytest.raises(InputError, match="no linear layer"):
        mg.tuning.regmean_pp(experts, base, data, include=["head*"])


def test_no_batches_are_an_error(setting):
    base, experts, data = setting
    with pytest.raises(InputError, match="data of b: no batches"):
        mg.tuning.regmean_pp(experts, base, {**data, "b": []})
