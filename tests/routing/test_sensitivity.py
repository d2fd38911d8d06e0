"""What the knobs of adaptive models do, measured on batches of known tasks."""

import pytest
import torch

from merganser.errors import InputError
from merganser.routing.adaptive import AdaptiveModel
from merganser.routing.layers import sweep_layers
from merganser.routing.routers import MlpRouter
from merganser.routing.sensitivity import accuracy, sweep_choice, sweep_redundancy
from support.expert_nets import WIDTH, heads_of, small_library

TASKS = ("a", "b", "c")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    base, library = small_library(tmp_path_factory.mktemp("sensitivity"), TASKS)
    return AdaptiveModel(base, library, heads_of(TASKS), layer="blocks.1.up", top=1)


def test_sweeps_of_thresholds_and_numbers(model):
    x = torch.randn(6, 5, WIDTH)
    data = {task: [(x + index, torch.zeros(6, dtype=torch.long))] for index, task in enumerate(TASKS)}
    rows = sweep_choice(model, data, thresholds=(0.0, 1.0), tops=(1, 3))
    assert [(row.threshold, row.top) for row in rows] == [(0.0, 1), (0.0, 3), (1.0, 1), (1.0, 3)]
    assert [row.set_size for row in rows] == [1, 3, 1, 1]
    assert rows[0].accuracy == rows[2].accuracy == rows[3].accuracy
    both = sweep_choice(model, data, (0.0,), (2,), scores=("logit", "posterior"))
    assert [row.score for row in both] == ["logit", "posterior"]
    for row in both:
        direct = model.with_settings(threshold=0.0, top=2, score=row.score)
        hits = [accuracy(direct.predict(parts[0][0]), task, parts[0][1]) for task, parts in data.items()]
        assert row.accuracy == pytest.approx(sum(hits) / len(hits))
    everything = sweep_choice(model, data, (0.0,), (1,), correct=lambda *_: True)
    assert everything[0].accuracy == 1
    together = model.with_settings(per_batch=True, probes=2)
    (row,) = sweep_choice(together, data, (0.1,), (2,))
    direct = together.with_settings(threshold=0.1, top=2)
    hits = [accuracy(direct.predict(parts[0][0]), task, parts[0][1]) for task, parts in data.items()]
    assert row.accuracy == pytest.approx(sum(hits) / len(hits))


def test_a_router_in_training_mode_is_swept_as_it_answers(model):
    support = {task: torch.randn(4, WIDTH) + index / 5 for index, task in enumerate(TASKS)}
    other = model.with_router(MlpRouter.fit("blocks.1.up", support, hidden=8, steps=20))
    x = torch.randn(6, 5, WIDTH)
    data, batches = {"a": [(x, torch.zeros(6, dtype=torch.long))]}, {"a": [x], "b": [x]}

    def sweep():
        return sweep_choice(other, data, (0.1, 0.3, 0.4), (3,)), sweep_redundancy(other, batches, (1.0,))

    expected, weights = sweep(), other.weigh(x)
    other.router.train()
    for _ in range(3):
        assert sweep() == expected
        assert torch.equal(other.weigh(x), weights)


def test_sweeps_of_redundancy(model):
    batches = {task: [torch.randn(6, 5, WIDTH), (torch.randn(2, 5, WIDTH),)] for task in TASKS}
    together = model.with_settings(per_batch=True, probes=2)
    assert sweep_redundancy(together, batches, (1.0,)) == sweep_redundancy(model, batches, (1.0,))
    kept = sweep_redundancy(model, batches, (-1.0, 1.0))
    assert kept[0].accepted == ("a",)
    assert kept[1].accepted == TASKS
    assert all(0 <= row.accuracy <= row.accuracy_among_top <= 1 for row in kept)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "no data"),
        ({"aa": [torch.ones(2, 5, WIDTH)]}, "'aa', which is not an expert"),
        ({"a": torch.ones(2, 5, WIDTH)}, "the data of 'a' are a single batch"),
        ({"a": {"x": torch.ones(2, 5, WIDTH)}}, "the data of 'a' are a single batch"),
        ({"a": []}, "no batch of 'a'"),
    ],
)
def test_data_that_are_none_are_refused(model, data, message):
    for sweep in (sweep_layers, sweep_choice, sweep_redundancy):
        with pytest.raises(InputError, match=message):
            sweep(model, data)


def test_labels_heads_and_settings_are_checked_before_any_pass(model, monkeypatch):
    x, labels = torch.ones(2, 5, WIDTH), torch.zeros(2, dtype=torch.long)
    monkeypatch.setattr(AdaptiveModel, "first_pass", lambda *_: pytest.fail("work began"))
    for data, options, message in (
        ([x], {}, "pairs of a batch and its labels"),
        ([(x, labels[:1])], {}, r"labels of shape \[1\] for a batch of 2 samples of 'a'"),
        ([(x, labels)], {"tops": (1, 0)}, "top 0"),
        ([(x, labels)], {"thresholds": (0.1, 2.0)}, "threshold 2.0"),
        ([(x, labels)], {"scores": ("logits",)}, "did you mean 'logit'"),
    ):
        with pytest.raises(InputError, match=message):
            sweep_choice(model, {"a": data}, **options)
    with pytest.raises(InputError, match="needs a model with heads"):
        sweep_choice(AdaptiveModel(model.module, model.library), {"a": [(x, labels)]})
