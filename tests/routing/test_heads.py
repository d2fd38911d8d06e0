"""Heads side by side: the best pair among those that were asked."""

import pytest
import torch

from merganser.errors import InputError
from merganser.routing.choices import Routing
from merganser.routing.heads import Heads


def routed(tasks, sets, weights):
    return Routing(tuple(tasks), weights, sets, torch.zeros(len(sets), dtype=torch.bool))


def test_heads_choose_the_best_pair_and_never_a_missing_one():
    heads = {"a": lambda z: z[:, :2] - 100, "b": lambda z: z[:, 2:] - 200}
    z = torch.tensor([[1.0, 2.0, 5.0, 3.0, 9.0]] * 3)
    sets = (frozenset("a"), frozenset("b"), frozenset("ab"))
    routing = routed("ab", sets, torch.full((3, 2), 0.5))
    found = Heads(heads, "ab").predict(z, routing)
    assert found.tasks == ("a", "b", "a")
    assert found.classes.tolist() == [1, 2, 1]
    assert found.scores.tolist() == [-98.0, -191.0, -98.0]
    by_share = Heads(heads, "ab").predict(z, routing, "probability")
    assert by_share.tasks == ("a", "b", "b")
    certain = Heads(heads, "ab").predict(z, routed("ab", sets, torch.tensor([[0.99, 0.01]] * 3)), "posterior")
    assert certain.tasks[2] == "a"


def test_a_batch_of_one_task_gets_one_head():
    heads = Heads({"a": lambda z: z[:, :2], "b": lambda z: z[:, 2:]}, "ab")
    z = torch.tensor([[1.0, 2.0, 0.0, 3.0], [4.0, 9.0, 5.0, 0.0], [3.0, 1.0, 0.0, 4.0]])
    routing = routed("ab", (frozenset("ab"),) * 3, torch.full((3, 2), 0.5))
    assert heads.predict(z, routing).tasks == ("b", "a", "b")
    found = heads.predict(z, routing, together=True)
    assert found.tasks == ("a", "a", "a")
    assert found.classes.tolist() == [1, 1, 0]
    assert torch.isfinite(found.logits).all()


def test_a_shared_head_is_one_and_its_task_is_the_likelier():
    shared = {"weight": torch.eye(2, 3)}
    heads = Heads({"a": shared, "b": shared, "c": {"weight": -torch.ones(1, 3)}}, "abc")
    sets = (frozenset("ab"), frozenset("abc"), frozenset("bc"))
    weights = torch.tensor([[0.2, 0.8, 0.0], [0.6, 0.3, 0.1], [0.0, 0.5, 0.5]])
    found = heads.predict(torch.ones(3, 3), routed("abc", sets, weights))
    assert found.tasks == ("b", "a", "b")
    assert len(found.columns) == 3
    assert sum(p.numel() for p in heads.parameters()) == 6 + 3
    assert set(heads.state_dict()) == {"a.weight", "c.weight"}


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({}, "found none"),
        ({"weight": torch.zeros(3)}, "weight \\[3\\]"),
        ({"weight": torch.zeros(3, 2), "scale": torch.zeros(3)}, "scale \\[3\\]"),
        ({"weight": torch.zeros(3, 2, dtype=torch.long)}, "in torch.int64"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(4)}, "3 classes has a bias of shape \\[4\\]"),
    ],
)
def test_tensors_that_are_no_linear_head_are_refused(head, message):
    with pytest.raises(InputError, match=message):
        Heads({"a": head}, "a")
