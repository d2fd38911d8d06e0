"""Heads side by side: the best pair among those that were asked."""

import pytest
import torch

from merganser.errors import InputError
from merganser.routing.choices import Routing
from merganser.routing.heads import Heads, NamedHead


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


def test_the_posterior_of_an_answer_adds_up_the_tasks_that_ask_the_same_question():
    names = ("no", "yes")
    columns = {"a": slice(0, 2), "b": slice(2, 4), "c": slice(4, 7)}
    plain = {task: lambda z, kept=kept: z[:, kept] for task, kept in columns.items()}
    heads = Heads({"a": NamedHead(plain["a"], names), "b": NamedHead(plain["b"], names), "c": plain["c"]}, "abc")
    p = torch.tensor([[0.9, 0.1, 0.3, 0.7, 0.8, 0.1, 0.1]], dtype=torch.float64)
    weights = torch.tensor([[0.25, 0.3, 0.45]])
    together = heads.predict(p.log(), routed("abc", (frozenset("abc"),), weights), "posterior")
    torch.testing.assert_close(
        together.logits.exp(),
        torch.tensor([[0.225 + 0.09, 0.025 + 0.21] * 2 + [0.36, 0.045, 0.045]]),
    )
    # Neither "no" of a nor that of b is as likely as c's first class, but both together are; b is the likelier task.
    alone = Heads(plain, "abc").predict(p.log(), routed("abc", (frozenset("abc"),), weights), "posterior")
    assert (alone.tasks, alone.classes.tolist()) == (("c",), [0])
    weights = torch.tensor([[0.29, 0.3, 0.41]])
    found = heads.predict(p.log(), routed("abc", (frozenset("abc"),), weights), "posterior")
    assert (found.tasks, found.classes.tolist()) == (("b",), [0])
    # Of the tasks that ask the question, only those in the set answer it, with the weight of all.
    part = heads.predict(p.log(), routed("abc", (frozenset("ac"),), weights), "posterior")
    torch.testing.assert_close(part.scores.exp(), torch.tensor([0.59 * 0.9]))
    assert part.tasks == ("a",)
    assert part.logits[0, 2:4].isneginf().all()


def test_the_likeliest_task_of_a_question_stands_for_all_of_its_tasks():
    names = ("no", "yes")
    heads = Heads({task: NamedHead(lambda z: z, names) if task in "ac" else lambda z: z for task in "abc"}, "abc")
    weights = torch.tensor([[0.35, 0.4, 0.25], [0.1, 0.5, 0.4], [0.2, 0.7, 0.1]], dtype=torch.float64)
    expected = torch.tensor([[0.6, 0.4, 0.25], [0.1, 0.5, 0.5], [0.3, 0.7, 0.1]], dtype=torch.float64)
    torch.testing.assert_close(heads.pooled(weights, "abc"), expected)
    torch.testing.assert_close(heads.pooled(weights.flip(1), "cba"), expected.flip(1))


def test_names_that_do_not_fit_a_head_are_refused():
    heads = Heads({"a": NamedHead(lambda z: z, ("no", "yes"))}, "a")
    with pytest.raises(InputError, match="'a' has 3 classes, but 2 names"):
        heads.predict(torch.zeros(1, 3), routed("a", (frozenset("a"),), torch.ones(1, 1)))


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
