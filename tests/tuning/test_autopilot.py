"""`mg.tuning.auto`: from modules and data to a decision; what it sees of experts; sets that are built to fail."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import merganser as mg
from merganser.errors import InputError, MerganserError
from merganser.evolve.preparation import Calibration
from merganser.tuning.autopilot.contenders import METHODS, Contender, propose
from merganser.tuning.autopilot.exams import Exam, exam_of_score
from merganser.tuning.autopilot.looking import Remark, look
from merganser.tuning.autopilot.merges import Merges
from merganser.tuning.expected_losses import SLOPE

CLASSES, WIDTH = 4, 8


def skilled(tasks=2, seed=0):
    """A base that guesses, experts that each read their own features, and samples of every task."""
    torch.manual_seed(seed)
    base = nn.Linear(WIDTH * tasks, CLASSES, bias=False)
    nn.init.normal_(base.weight, std=0.3)
    experts, data = {}, {}
    for task in range(tasks):
        own = slice(WIDTH * task, WIDTH * (task + 1))
        prototypes = torch.randn(CLASSES, WIDTH)
        expert = copy.deepcopy(base)
        with torch.no_grad():
            expert.weight[:, own] += 0.5 * prototypes - base.weight[:, own]
        labels = torch.arange(90) % CLASSES
        inputs = torch.zeros(90, WIDTH * tasks)
        inputs[:, own] = prototypes[labels] + 0.5 * torch.randn(90, WIDTH)
        experts[f"task{task}"] = expert
        data[f"task{task}"] = [(inputs[:50], labels[:50]), (inputs[50:], labels[50:])]
    return base, experts, data


def opened(base, experts):
    return look(mg.open(base), {name: mg.open(expert) for name, expert in experts.items()})


def test_a_merge_that_is_better_is_chosen_and_is_what_a_recipe_gives():
    base, experts, data = skilled()
    weights, decision = mg.tuning.auto(experts, base, data=data)
    assert decision.verdict == "merge", decision.text
    assert decision.score.value > 0.85 > decision.challenges[0].score.value
    recipe = decision.recipe
    again = mg.merge(experts, recipe["method"], base, **recipe["parameters"])
    assert torch.equal(weights["weight"], again["weight"])
    repeated = mg.tuning.auto(experts, base, data=data)[1]
    assert replace(repeated, seconds=0) == replace(decision, seconds=0), "the same seed, the same race"
    plain = json.loads(json.dumps(decision.to_dict()))
    assert plain["kind"] == "Decision"
    assert plain["challenges"][0]["gain"] is None
    assert plain["challenges"][2]["better"] is True
    page = decision._repr_html_()
    assert decision.kept in page
    assert "The race" in page
    assert all(label in page for rung in decision.rungs for label in rung.scores)


def test_the_quick_merge_at_a_scale_is_the_method_at_that_scale():
    base, experts, _ = skilled(3)
    merges = Merges(base, experts, 0, 1 << 30)
    for contender in propose(tuple(experts), ()):
        quick, exact = (make(contender).weights()["weight"] for make in (merges.quick, merges.exact))
        torch.testing.assert_close(quick, exact, rtol=1e-4, atol=1e-5, msg=contender.label)
    assert len(merges._kept) == len({c.name for c in propose(tuple(experts), ())}) - 1, "all methods but the plain one"
    small = Merges(base, experts, 0, 1)
    for contender in propose(tuple(experts), ()):
        small.quick(contender)
        assert len(small._kept) <= 1


def test_kernels_are_merged_as_matrices():
    torch.manual_seed(0)
    base = {"kernel": torch.randn(4, 3, 3, 3), "weight": torch.randn(4, 4)}
    experts = {each: {name: tensor + torch.randn_like(tensor) for name, tensor in base.items()} for each in "abc"}
    merges = Merges(base, experts, 0, 1 << 30)
    for method, shapes in (("tsv", {"convolutions": True}), ("ties", {})):
        document = merges.document(Contender(method, ("a", "b", "c")).at(1.0))
        assert document["parameters"] == {**shapes, "scale": 1.0}
    merged = merges.exact(Contender("tsv", ("a", "b", "c")).at(1.0))
    assert not any("convolutions" in note for note in merged.merge.plan.notes)
    expected = mg.merge(
        {name: {"kernel": expert["kernel"].flatten(1)} for name, expert in experts.items()},
        "tsv",
        {"kernel": base["kernel"].flatten(1)},
    )
    torch.testing.assert_close(merged.weights()["kernel"].flatten(1), expected["kernel"])


def test_batches_are_asked_sample_by_sample():
    base, experts, data = skilled()
    heads = {name: nn.Linear(CLASSES, CLASSES) for name in data}
    ignored = data["task1"][0][1].clone()
    ignored[:7] = -100
    data["task1"][0] = (data["task1"][0][0], ignored)
    validation = mg.tuning.Validation(base, data, heads)
    weights = experts["task0"].state_dict()
    assert validation.counts() == {"task0": 90, "task1": 83}
    answers = validation.answers(weights, {"task0": range(90), "task1": range(83)})
    assert {task: pytest.approx(np.mean(own)) for task, own in answers.items()} == validation.scores(weights)
    some = [80, 3, 51]
    assert validation.answers(weights, {"task0": some})["task0"] == [answers["task0"][i] for i in some]


def test_the_score_of_a_function():
    base, experts, data = skilled()
    validation = mg.tuning.Validation(base, data)
    by_task = mg.tuning.auto(experts, base, score=validation.answers, items=validation.counts(), seed=3)[1]
    assert by_task.rungs == mg.tuning.auto(experts, base, data=data, seed=3)[1].rungs
    single = mg.tuning.auto(
        experts, base, score=lambda weights, items: validation.answers(weights, {"task0": items})["task0"], items=90
    )[1]
    assert (single.verdict, single.kept) == ("do not merge", "task0"), "its own expert is as good as it gets"


def test_what_is_wrong_is_said():
    base, experts, data = skilled()
    function = lambda weights, items: [0.0] * len(items)  # noqa: E731
    for message, arguments in (
        ("give either data", {"data": data, "score": function, "items": 5}),
        ("a score needs items", {"score": function}),
        ("give either data", {"items": 5}),
        ("heads are for accuracy", {"score": function, "items": 50, "heads": {}}),
        ("expected one for each of the models", {"data": {"x": data["task0"]}}),
        ("unknown method 'tyes'|no method 'tyes'|did you mean 'ties'", {"data": data, "methods": ["tyes"]}),
        ("needs a base and a scale", {"data": data, "methods": ["slerp"]}),
        ("too small for", {"data": data, "budget": 10}),
        ("questions must be at least 1", {"data": data, "questions": 0}),
        (
            "no task 'task9'; did you mean",
            {"data": data, "calibration": {"task9": Calibration(answers=np.ones((2, 90)))}},
        ),
        (
            "covers 80 items, but the task has 90",
            {"data": data, "calibration": {"task0": Calibration(np.ones((2, 80)))}},
        ),
        ("returned a list, not answers by task", {"score": lambda w, i: [1.0], "items": {"a": 50, "b": 50}}),
    ):
        with pytest.raises(MerganserError, match=message):
            mg.tuning.auto(experts, base, **arguments)


def test_the_registry_brings_its_methods():
    labels = {contender.name for contender in propose(("a", "b"), ())}
    from merganser.methods.registry import registry

    assert labels == set(METHODS) & set(registry())


def test_experts_of_different_lengths_are_tried_with_equal_norms_where_a_method_can():
    assert not any("norms" in c.parameters for c in propose(("a", "b"), ()))
    found = propose(("a", "b"), (Remark("norms", "", ("a", "b")),), ["tsv"])
    assert [c.label for c in found][-1] == "tsv norms=equal scale=1"
    assert len(found) == 4


def test_calibrated_items_are_spread_over_their_kinds():
    generator = np.random.default_rng(0)
    easy = np.arange(120) < 60
    answers = (generator.random((20, 120)) < np.where(easy, 0.95, 0.1)).astype(float)
    known = {"score": Calibration(answers=answers)}
    exam = exam_of_score(lambda weights, items: [0.0] * len(items), 120, 0, known)
    assert isinstance(exam, Exam)
    assert sorted(exam.orders["score"]) == list(range(120))
    for count in (16, 32, 64):
        share = easy[list(exam.orders["score"])[:count]].mean()
        assert abs(share - 0.5) <= 2.5 / count, "every beginning has as many easy items as all have"


# Sets that are built to fail.


def test_an_expert_of_another_base_is_named_and_tried_without():
    base, experts, data = skilled(3)
    torch.manual_seed(99)
    experts["task2"] = nn.Linear(WIDTH * 3, CLASSES, bias=False)
    nn.init.normal_(experts["task2"].weight, std=0.3)
    _, decision = mg.tuning.auto(experts, base, data=data)
    (remark,) = [remark for remark in decision.remarks if remark.kind == "other base"]
    assert remark.experts == ("task2",)
    assert "not a fine-tune of this base" in remark.text
    assert any("without task2" in label for rung in decision.rungs for label in rung.scores)
    _, guessed = mg.tuning.auto(experts, base)
    assert {model["path"] for model in guessed.recipe["models"]} == {"task0", "task1"}
    assert remark.text in guessed.text


def test_a_duplicate_is_named_and_counts_once():
    base, experts, data = skilled()
    experts["again"] = copy.deepcopy(experts["task0"])
    data["again"] = data["task0"]
    _, decision = mg.tuning.auto(experts, base, data=data)
    (remark,) = decision.remarks
    assert remark.kind == "duplicate"
    assert remark.experts == ("again", "task0")
    assert {model["path"] for model in decision.best_recipe["models"]} == {"task0", "task1"}


def test_an_expert_that_is_far_too_long_is_named_and_tried_without():
    base, experts, data = skilled(3)
    with torch.no_grad():
        for expert in experts.values():  # so short that 20 times as much is still a fine-tune
            expert.weight.copy_(base.weight + 0.02 * (expert.weight - base.weight))
        experts["task2"].weight.copy_(base.weight + 20 * (experts["task2"].weight - base.weight))
    _, decision = mg.tuning.auto(experts, base, data=data)
    (remark,) = decision.remarks
    assert remark.kind == "long"
    assert remark.experts == ("task2",)
    assert "times as long" in remark.text
    assert any("without task2" in label for rung in decision.rungs for label in rung.scores)
    if decision.verdict == "do not merge":
        assert remark.text in decision.text


def test_a_base_given_as_an_expert_leaves_nothing_to_merge():
    base, experts, _data = skilled()
    weights, decision = mg.tuning.auto({"same": base, "task0": experts["task0"]}, base, data=None)
    assert decision.verdict == "do not merge"
    assert decision.kept == "task0"
    assert "same equals the base" in decision.text
    assert torch.equal(weights["weight"], experts["task0"].weight)


def test_twins_opposites_and_unequal_lengths_are_remarked():
    torch.manual_seed(0)
    base = {"w": torch.randn(30, 30)}
    delta, other = 0.05 * torch.randn(30, 30), 0.05 * torch.randn(30, 30)
    found = opened(
        base,
        {
            "a": {"w": base["w"] + delta},
            "twin": {"w": base["w"] + delta + 0.3 * other},
            "against": {"w": base["w"] - delta},
            "small": {"w": base["w"] + other / 3},
        },
    )
    assert {(remark.kind, *sorted(remark.experts)) for remark in found} == {
        ("twins", "a", "twin"), ("opposed", "a", "against"), ("opposed", "against", "twin"), ("norms", "small", "twin"),
    }  # fmt: skip


def test_weights_that_are_not_finite_are_refused():
    base, experts, _ = skilled()
    with torch.no_grad():
        experts["task1"].weight[0, 0] = float("nan")
    with pytest.raises(InputError, match="task1: contains NaN"):
        mg.tuning.auto(experts, base)
    with pytest.raises(InputError, match="no tensor of one name and shape"):
        opened(base, {"a": {"v": torch.ones(2)}})


def test_without_labels_the_experts_answers_stand_in_and_the_loss_is_estimated():
    base, experts, data = skilled()
    inputs = {name: [x for x, _ in batches] for name, batches in data.items()}
    weights, decision = mg.tuning.auto(experts, base, data=inputs, labelled=False)
    labels = mg.tuning.pseudo_label(experts, base, inputs)
    given, same = mg.tuning.auto(experts, base, data=labels)
    assert (decision.kept, decision.asked) == (same.kept, same.asked)
    assert torch.equal(weights["weight"], given["weight"])
    assert same.loss is None, "labels are taken for what they seem to be"
    assert decision.verdict == "merge", decision.text
    assert set(decision.loss.disagreement) == set(experts)
    assert decision.score.value == pytest.approx(1 - sum(decision.loss.disagreement.values()) / 2)
    assert decision.loss.value == pytest.approx(SLOPE * (1 - decision.score.value))
    assert f"is expected to lose {decision.loss} of their accuracy" in decision.text
    with pytest.raises(InputError, match="labelled=False is for batches"):
        mg.tuning.auto(experts, base, score=len, items=20, labelled=False)


def test_without_data_there_is_a_default_and_a_reason():
    base, experts, _ = skilled(3)
    weights, decision = mg.tuning.auto(experts, base)
    assert decision.verdict == "no evidence"
    assert decision.kept == "ace scale=0.866", "1.5/√3"
    assert "no evidence to choose" in decision.text
    assert "measured sets of 3 to 20 experts" in decision.text
    assert torch.equal(weights["weight"], mg.merge(experts, "ace", base, scale=0.866)["weight"])
    two = {name: experts[name] for name in ("task0", "task1")}
    weights, decision = mg.tuning.auto(list(two.values()), base)
    assert decision.kept == "task_arithmetic scale=0.5"
    assert "The mean of two kept" in decision.text
    torch.testing.assert_close(weights["weight"], (experts["task0"].weight + experts["task1"].weight) / 2)


def test_a_journal_belongs_to_its_experts(tmp_path):
    base, experts, data = skilled()
    journal = tmp_path / "answers.jsonl"
    first = mg.tuning.auto(experts, base, data=data, journal=journal)[1]
    asked = []
    again = mg.tuning.auto(experts, base, data=data, journal=journal, on_answer=lambda *a: asked.append(a))[1]
    assert not asked
    assert again == first
    other = {task: [(x + 1, y) for x, y in batches] for task, batches in data.items()}
    with pytest.raises(InputError, match="use another file"):
        mg.tuning.auto(experts, base, data=other, journal=journal)
    with torch.no_grad():
        experts["task0"].weight[0, 0] += 1
    with pytest.raises(InputError, match="use another file"):
        mg.tuning.auto(experts, base, data=data, journal=journal)
