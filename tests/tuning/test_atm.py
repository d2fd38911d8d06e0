"""ATM: one step a round is joint training; budgets, history and resumption."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from merganser.errors import InputError
from merganser.tuning.atm import atm


def setting(seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    data = {t: (torch.randn(12, 4).double() + i, torch.randint(0, 3, (12,))) for i, t in enumerate("abc")}
    return module, data


def loss(module, weights, batch):
    return F.cross_entropy(torch.func.functional_call(module, weights, (batch[0],)), batch[1])


def descend(module, objective, weights, eta, epochs):
    for _ in range(epochs):
        grads = torch.func.grad(objective)(weights)
        weights = {n: weights[n] - eta * grads[n] for n in weights}
    return weights


def steps(module, data, eta=0.3, calls=None):
    def make(task):
        def step(weights, epochs):
            if calls is not None:
                calls.append((task, epochs))
            return descend(module, lambda w: loss(module, w, data[task]), weights, eta, epochs)

        return step

    return {task: make(task) for task in data}


@pytest.mark.parametrize("average", [True, False])
def test_one_step_a_round_is_joint_training(average):
    module, data = setting()
    base = {k: v.clone() for k, v in module.state_dict().items()}
    result = atm(base, steps(module, data), budget=4, alpha=0.6, average=average)
    share = 1 / len(data) if average else 1.0
    joint = descend(module, lambda w: share * sum(loss(module, w, b) for b in data.values()), base, 0.6 * 0.3, 4)
    for name in base:
        torch.testing.assert_close(result.weights[name], joint[name], rtol=1e-12, atol=1e-14)
        assert torch.equal(base[name], module.state_dict()[name])
    assert [r.epochs_spent for r in result.history] == [1, 2, 3, 4]


def test_budget_is_spent_exactly_and_recorded():
    module, data = setting()
    calls = []
    base = module.state_dict()
    result = atm(base, steps(module, data, calls=calls), budget=5, epochs_per_round=2, score=lambda w: 1.0)
    assert [c for c in calls if c[0] == "a"] == [("a", 2), ("a", 2), ("a", 1)]
    first = result.history[0]
    tuned = steps(module, data)["b"](dict(base), 2)
    expected = sum(float((tuned[n] - base[n]).square().sum()) for n in base) ** 0.5
    assert first.task_norms["b"] == pytest.approx(expected)
    assert -1 <= first.mean_cosine <= 1
    assert first.score == 1.0


def test_resumes_to_the_same_bits(tmp_path):
    module, data = setting()
    base = module.state_dict()
    whole = atm(base, steps(module, data), budget=5)
    calls = []
    atm(base, steps(module, data), budget=2, path=tmp_path)

    def breaks(weights, epochs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atm(base, {**steps(module, data), "c": breaks}, budget=5, path=tmp_path)
    resumed = atm(base, steps(module, data, calls=calls), budget=5, path=tmp_path)
    assert len(calls) == 3 * 3
    assert resumed.history == whole.history
    assert all(torch.equal(resumed.weights[n], whole.weights[n]) for n in base)
    finished = atm(base, steps(module, data, calls=calls), budget=5, path=tmp_path)
    assert len(calls) == 3 * 3
    assert finished.history == whole.history
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert json.loads((tmp_path / "history.json").read_text())["rounds"][0]["number"] == 1
    with pytest.raises(InputError, match="started with alpha 1.0, but now it is 0.2; use another directory"):
        atm(base, steps(module, data), budget=9, alpha=0.2, path=tmp_path)
    with pytest.raises(InputError, match="started with base"):
        atm({n: v + 1 for n, v in base.items()}, steps(module, data), budget=9, path=tmp_path)


def test_a_step_that_trains_in_place_does_no_harm():
    base = {"w": torch.zeros(2)}

    def step(weights, epochs):
        weights["w"] += 1
        return weights

    result = atm(base, {"a": step, "b": step}, budget=2)
    assert base["w"].tolist() == [0, 0]
    assert result.weights["w"].tolist() == [2, 2]


def test_integers_stay_and_mistakes_are_named():
    base = {"w": torch.zeros(2), "steps": torch.tensor(3)}
    result = atm(base, {"a": lambda w, e: {"w": w["w"] + 1, "steps": w["steps"] + 1}}, budget=1)
    assert result.weights["steps"] == 3
    assert result.weights["w"].tolist() == [1, 1]
    with pytest.raises(InputError, match="without 'w'"):
        atm(base, {"a": lambda w, e: {"steps": w["steps"]}}, budget=1)
    with pytest.raises(InputError, match="step function"):
        atm(base, {}, budget=1)
    with pytest.raises(InputError, match="positive"):
        atm(base, {"a": lambda w, e: w}, budget=0)
