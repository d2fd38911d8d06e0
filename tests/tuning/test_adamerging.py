"""AdaMerging lowers the entropy it minimises and touches nothing else."""

import copy
import json

import pytest
import torch
from torch import nn

import merganser as mg
from merganser.errors import InputError
from merganser.tuning.adamerging import learn_coefficients
from merganser.tuning.entropy import prediction_entropy


@pytest.fixture
def setting():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    base = {k: v.clone() for k, v in module.state_dict().items()}
    vectors = {t: {k: torch.randn_like(v) for k, v in base.items()} for t in ("a", "b")}
    inputs = {t: [torch.randn(16, 4), torch.randn(9, 4)] for t in ("a", "b")}
    return module, base, vectors, inputs


@pytest.mark.parametrize("wise", ["task", "tensor"])
def test_entropy_falls_and_inputs_are_untouched(setting, wise):
    before = copy.deepcopy(setting)
    report = learn_coefficients(*setting, wise=wise, learning_rate=0.02, steps=60)
    assert report.entropy_after < report.entropy_before - 0.02
    assert len(report.history) == 60
    for found, kept in zip(setting[1:], before[1:], strict=True):
        torch.testing.assert_close(found, kept, rtol=0, atol=0)
    for (_, p), q in zip(setting[0].named_parameters(), before[0].parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.grad is None
        assert p.requires_grad
    values = [set(c.values()) for c in report.coefficients.values()]
    assert all(len(v) == (1 if wise == "task" else 4) for v in values)
    json.dumps(report.to_dict(), allow_nan=False)


def test_the_merge_is_what_was_scored(setting):
    module, base, vectors, inputs = setting
    report = learn_coefficients(*setting, learning_rate=0.02, steps=5)
    merged = report.merge(base, vectors)
    for name in base:
        expected = base[name] + sum(report.coefficients[t][name] * vectors[t][name] for t in vectors)
        torch.testing.assert_close(merged[name], expected)
    scores = [
        torch.stack([prediction_entropy(torch.func.functional_call(module, merged, (x,))) for x in xs]).mean()
        for xs in inputs.values()
    ]
    assert float(torch.stack(scores).mean()) == pytest.approx(report.entropy_after, rel=1e-5)


def test_no_steps_is_task_arithmetic_at_the_initial_coefficient(setting):
    report = learn_coefficients(*setting, steps=0)
    assert all(v == pytest.approx(0.3) for c in report.coefficients.values() for v in c.values())
    assert report.entropy_before == report.entropy_after


def test_bounds_heads_and_partial_vectors(setting):
    module, base, vectors, inputs = setting
    part = {"a": {"0.weight": vectors["a"]["0.weight"]}, "b": vectors["b"]}
    report = learn_coefficients(
        module,
        base,
        part,
        inputs,
        learning_rate=0.5,
        steps=10,
        bounds=(0.0, 0.4),
        heads={"a": lambda z: z[:, :2], "b": lambda z: z},
    )
    assert all(0 <= v <= 0.4 + 1e-6 for c in report.coefficients.values() for v in c.values())
    assert report.merge(base, part).keys() == base.keys()


def test_entropy_of_known_distributions():
    assert float(prediction_entropy(torch.zeros(2, 8))) == pytest.approx(torch.tensor(8.0).log().item())
    assert float(prediction_entropy(torch.tensor([[100.0, 0.0]]))) == pytest.approx(0, abs=1e-6)


def test_mistakes(setting):
    module, base, vectors, inputs = setting
    with pytest.raises(InputError, match="name the same tasks"):
        learn_coefficients(module, base, vectors, {"a": inputs["a"]})
    with pytest.raises(InputError, match="no inputs for task 'b'"):
        learn_coefficients(module, base, vectors, {"a": inputs["a"], "b": []})
    with pytest.raises(InputError, match="did you mean '0.weight'"):
        learn_coefficients(module, base, {"a": {"0.weigth": vectors["a"]["0.weight"]}, "b": vectors["b"]}, inputs)


@pytest.mark.parametrize("learn", [mg.tuning.adamerge, mg.tuning.adarank])
def test_networks_with_running_statistics(learn):
    """Which are merged but have no derivatives."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    base(torch.randn(30, 5))
    experts = {}
    for name in ("a", "b"):
        experts[name] = copy.deepcopy(base)
        with torch.no_grad():
            for parameter in experts[name].parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        experts[name](2 * torch.randn(30, 5))
    data = {name: [torch.randn(20, 5)] for name in experts}
    weights, _ = learn(experts, base, data, steps=5, learning_rate=0.05)
    means = [model[1].running_mean for model in (base, *experts.values())]
    wanted = means[0] + 0.3 * sum(mean - means[0] for mean in means[1:])
    torch.testing.assert_close(weights["1.running_mean"], wanted)
    plain = mg.merge(experts, "task_arithmetic", base, scale=0.3)
    assert not torch.allclose(weights["0.weight"], plain["0.weight"])
