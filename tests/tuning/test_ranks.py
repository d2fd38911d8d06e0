"""AdaRank lowers the entropy, prunes components, and its statistics make the same merge in a recipe."""

import copy

import pytest
import torch
from torch import nn

import merganser as mg
from merganser.tuning.entropy import prediction_entropy


@pytest.fixture
def setting():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
    experts = {}
    for name in ("a", "b"):
        experts[name] = copy.deepcopy(base)
        with torch.no_grad():
            for parameter in experts[name].parameters():
                parameter.add_(0.5 * torch.randn_like(parameter))
    data = {name: [torch.randn(24, 6), torch.randn(9, 6)] for name in experts}
    return base, experts, data


def test_entropy_falls_and_components_are_pruned(setting, tmp_path):
    base, experts, data = setting
    before = copy.deepcopy(experts["a"].state_dict())
    weights, learned = mg.tuning.adarank(experts, base, data, learning_rate=0.02, steps=60)
    assert learned.entropy.after < learned.entropy.before - 0.02
    assert len(learned.entropy.history) == 60
    sizes = {"0.weight": 6, "0.bias": 1, "2.weight": 4, "2.bias": 1}
    kept = learned.kept["a"]
    assert all(0 <= kept[name] <= size for name, size in sizes.items())
    assert sum(kept.values()) + sum(learned.kept["b"].values()) < 2 * sum(sizes.values())
    for name, value in experts["a"].state_dict().items():
        assert torch.equal(value, before[name])
    paths = {name: str(found.save(tmp_path / f"{name}.safetensors")) for name, found in learned.components.items()}
    again = mg.merge(experts, "adarank", base, statistics={"components": paths})
    assert all(torch.equal(weights[name], value) for name, value in again.items())


@pytest.mark.parametrize("learn", [mg.tuning.adarank, mg.tuning.adamerge])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_learning_where_gradients_are_switched_off(setting, mode, learn):
    """As notebooks do at their top."""
    base, experts, data = setting
    with mode():
        weights, _ = learn(experts, base, data, steps=3)
    assert weights.keys() == base.state_dict().keys()


def test_the_merge_is_what_was_scored(setting):
    base, experts, data = setting
    weights, learned = mg.tuning.adarank(experts, base, data, learning_rate=0.02, steps=7)
    scores = [
        torch.stack([prediction_entropy(torch.func.functional_call(base, weights, (x,))) for x in xs]).mean()
        for xs in data.values()
    ]
    assert float(torch.stack(scores).mean()) == pytest.approx(learned.entropy.after, rel=1e-4)


def test_no_steps_is_task_arithmetic_of_the_leading_components(setting):
    base, experts, data = setting
    weights, learned = mg.tuning.adarank(experts, base, data, steps=0, init=0.4)
    wanted = mg.merge(experts, "task_arithmetic", base, scale=0.4)
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    _, half = mg.tuning.adarank(list(experts.values()), base, list(data.values()), steps=0, rank_fraction=0.5)
    assert half.kept["0"] == {"0.weight": 3, "0.bias": 1, "2.weight": 2, "2.bias": 1}
    assert learned.kept["a"]["0.weight"] == 6
