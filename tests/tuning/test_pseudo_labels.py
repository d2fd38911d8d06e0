"""Pseudo-labels are the experts' own predictions, and choosers work with them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import merganser as mg
from merganser.errors import InputError


@pytest.fixture
def base():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.9), nn.Linear(8, 5))


@pytest.fixture
def experts(base):
    found = {}
    for name in ("a", "b"):
        found[name] = copy.deepcopy(base)
        for parameter in found[name].parameters():
            parameter.data += 0.5 * torch.randn_like(parameter)
    return found


def inputs(*sizes):
    return [torch.randn(size, 6) for size in sizes]


@pytest.mark.parametrize("heads", [None, {"a": lambda x: x[:, :3], "b": lambda x: x[:, 2:]}], ids=["plain", "heads"])
def test_labels_are_what_the_expert_of_the_task_answers(base, experts, heads):
    data = {"a": inputs(4, 3), "b": inputs(5)}
    labels = mg.tuning.pseudo_label(experts, base, data, heads=heads)
    for name, batches in labels.items():
        for (given, found), expected in zip(batches, data[name], strict=True):
            logits = experts[name].eval()(expected)
            assert torch.equal(given, expected)
            assert torch.equal(found, (heads[name](logits) if heads else logits).argmax(1))
    agreement = mg.tuning.Validation(base, labels, heads)
    assert agreement.scores(experts["a"].state_dict())["a"] == 1
    assert agreement.scores(experts["b"].state_dict())["b"] == 1


def test_targets_are_ignored_and_lists_stay_lists(base, experts):
    x = torch.randn(7, 6)
    models = [{n: t.clone() for n, t in experts[name].state_dict().items()} for name in experts]
    labels = mg.tuning.pseudo_label(models, base, [[(x, torch.full((7,), 4))], [x]])
    assert isinstance(labels, list)
    assert torch.equal(labels[0][0][1], experts["a"].eval()(x).argmax(1))
    _, search = mg.tuning.choose_scale(models, "task_arithmetic", base, data=labels, alphas=[0.1, 0.5])
    assert search.best in ("0.1", "0.5")


def test_refusals(base, experts):
    with pytest.raises(InputError, match="data can only be passed through a module"):
        mg.tuning.pseudo_label(experts, base.state_dict(), {"a": inputs(2), "b": inputs(2)})
    with pytest.raises(InputError, match="expected one for each of the models"):
        mg.tuning.pseudo_label(experts, base, {"a": inputs(2)})
    with pytest.raises(InputError, match="data of 'b': no batches"):
        mg.tuning.pseudo_label(experts, base, {"a": inputs(2), "b": []})
    with pytest.raises(InputError, match="a: 'w' is not a tensor of the module"):
        mg.tuning.pseudo_label({"a": {"w": torch.ones(2)}, "b": experts["b"]}, base, {"a": inputs(2), "b": inputs(2)})
