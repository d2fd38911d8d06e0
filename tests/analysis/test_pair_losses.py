"""The expected losses of pairs against a plain computation, and their ends."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch
from torch import nn

import merganser as mg
from merganser.analysis.pair_losses import pair_losses
from merganser.errors import InputError
from merganser.tuning.expected_losses import SLOPE, SPREAD


@pytest.fixture
def base():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def tuned(base, seed, size=0.5):
    torch.manual_seed(seed)
    found = copy.deepcopy(base)
    for parameter in found.parameters():
        parameter.data += size * torch.randn_like(parameter)
    return found


def test_pairs_are_ranked_by_how_often_their_mean_answers_otherwise(base):
    experts = {name: tuned(base, seed, size) for name, seed, size in (("a", 1, 0.1), ("b", 2, 0.5), ("c", 3, 2.0))}
    heads = {name: nn.Linear(4, 3) for name in experts}
    data = {name: [torch.randn(30, 6), torch.randn(10, 6)] for name in experts}
    found = pair_losses(experts, base, data, heads=heads)
    expected = {}
    for x, y in itertools.combinations(experts, 2):
        mean = copy.deepcopy(base)
        states = experts[x].state_dict(), experts[y].state_dict()
        mean.load_state_dict({n: (states[0][n] + states[1][n]) / 2 for n in states[0]})
        shares = []
        for name in (x, y):
            inputs = torch.cat(data[name])
            differs = heads[name](mean(inputs)).argmax(1) != heads[name](experts[name](inputs)).argmax(1)
            shares.append(float(differs.double().mean()))
        expected[x, y] = tuple(shares)
    assert {pair.experts for pair in found.pairs} == set(expected)
    for pair in found.pairs:
        assert pair.disagreement == pytest.approx(expected[pair.experts])
        assert pair.loss == pytest.approx(SLOPE * sum(pair.disagreement) / 2)
    assert [pair.loss for pair in found.pairs] == sorted((pair.loss for pair in found.pairs), reverse=True)
    of_a = [pair.loss for pair in found.pairs if "a" in pair.experts]
    assert found.by_expert["a"] == pytest.approx(sum(of_a) / 2)
    assert json.loads(json.dumps(found.to_dict()))["pairs"][0]["experts"] == list(found.worst.experts)


def test_equal_experts_lose_nothing_and_the_error_falls_with_inputs(base):
    expert = tuned(base, 1)
    few, many = (
        pair_losses([expert, copy.deepcopy(expert)], base, [[torch.randn(n, 6)]] * 2).worst for n in (10, 1000)
    )
    assert few.loss == many.loss == 0
    assert SPREAD < many.error < few.error


def test_experts_that_undo_each_other_lose_most(base):
    expert, other = tuned(base, 1, 1.0), tuned(base, 2, 0.05)
    opposite = copy.deepcopy(base)
    opposite.load_state_dict({n: 2 * t - expert.state_dict()[n] for n, t in base.state_dict().items()})
    data = {name: [torch.randn(200, 6)] for name in ("a", "anti", "b")}
    found = mg.analysis.pair_losses.pair_losses({"a": expert, "anti": opposite, "b": other}, base, data)
    assert found.worst.experts == ("a", "anti")


def test_another_method_is_judged_by_its_own_answers(base):
    experts = {name: tuned(base, seed) for name, seed in (("a", 1), ("b", 2))}
    inputs = {name: torch.randn(50, 6) for name in experts}
    found = pair_losses(experts, base, {n: [x] for n, x in inputs.items()}, method="ties", density=0.5, scale=2.0)
    merged = mg.merge(experts, "ties", base, density=0.5, scale=2.0)
    differs = []
    for name, x in inputs.items():
        answers = torch.func.functional_call(base, merged, x).argmax(1)
        differs.append(float((answers != experts[name](x).argmax(1)).double().mean()))
    assert found.worst.disagreement == pytest.approx(differs)
    assert differs != pytest.approx(pair_losses(experts, base, {n: [x] for n, x in inputs.items()}).worst.disagreement)


def test_refusals(base):
    with pytest.raises(InputError, match="two or more experts"):
        pair_losses([base], base, [[torch.randn(2, 6)]])
    with pytest.raises(InputError, match="data can only be passed through a module"):
        pair_losses([base, base], base.state_dict(), [[torch.randn(2, 6)]] * 2)
