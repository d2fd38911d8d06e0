"""Accuracy on labelled batches as a score of weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from merganser.errors import InputError
from merganser.tuning.validation import IGNORED, Validation


@pytest.fixture
def world():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5))
    data = {
        task: [(torch.randn(size, 5), torch.randint(0, 4, (size,))) for size in (3, 8, 5)] for task in ("one", "two")
    }
    return module, data


def naive(weights, batches):
    right = [int((x @ weights["0.weight"].T + weights["0.bias"]).argmax(1)[i] == y[i]) for x, y in batches
             for i in range(len(y))]  # fmt: skip
    return sum(right) / len(right)


def test_accuracy_against_a_loop(world):
    module, data = world
    weights = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    validation = Validation(module, data)
    for budget in (None, 1, 2, 99):
        expected = {task: naive(weights, batches[:budget]) for task, batches in data.items()}
        assert validation.scores(weights, budget) == pytest.approx(expected)
        assert validation(weights, budget) == pytest.approx(sum(expected.values()) / 2)


def test_the_module_is_left_alone(world):
    module, data = world
    before = copy.deepcopy(module.state_dict())
    validation = Validation(module, data)
    with torch.no_grad():
        module[0].weight.zero_()
    validation({name: torch.zeros_like(value) for name, value in before.items()})
    assert module.training
    assert validation(before) == validation({})  # what weights do not name is the module's, as it was


def test_heads_and_positions_not_asked():
    body = nn.Identity()
    flip = {"plain": lambda x: x, "flipped": lambda x: -x}
    x = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])
    y = torch.tensor([[1, 0, IGNORED]])
    found = Validation(body, {"plain": [(x, y)], "flipped": [(x, y)]}, flip).scores({})
    assert found == {"plain": 1.0, "flipped": 0.0}


def test_mistakes(world):
    module, data = world
    x, y = data["one"][0]
    for batches, message in (
        ({}, "at least one labelled batch"),
        ({"one": []}, "at least one labelled batch"),
        ({"one": [x]}, "data of 'one': expected labelled batches"),
    ):
        with pytest.raises(InputError, match=message):
            Validation(module, batches)
    with pytest.raises(InputError, match="heads are for \\['other'\\]"):
        Validation(module, {"one": [(x, y)]}, {"other": lambda z: z})
    with pytest.raises(InputError, match="targets of shape \\(3, 1\\) for predictions of shape \\(3,\\)"):
        Validation(module, {"one": [(x, y[:, None])]})({})


def test_what_is_not_a_number_is_not_right(world):
    """The arg max of a row with NaN is the place of the NaN, which may be the target."""
    module, data = world
    broken = {name: torch.full_like(value, torch.nan) for name, value in module.state_dict().items()}
    assert Validation(module, data)(broken) == 0.0


@pytest.mark.parametrize("target", [4, -1])
def test_targets_beyond_the_classes_are_refused(world, target):
    module, data = world
    x, y = data["two"][0]
    odd = torch.full_like(y, target)
    with pytest.raises(InputError, match=f"data of 'two': target {target}, but logits of 4 classes"):
        Validation(module, data | {"two": [(x, odd)]})(module.state_dict())
