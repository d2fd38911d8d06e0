"""What a study costs: operations against a count by hand, every part against what was asked, kept when interrupted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from synthetic_designs import design
from synthetic_world import World
from torch import nn

from merganser.evolve.costs import add_costs, forecast, show_flops
from merganser.evolve.metering import CostMeter
from merganser.evolve.store import Answers, Store, Trial
from merganser.evolve.study import Study


def test_operations_are_those_of_the_matrices_at_every_place():
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False))
    convolution = nn.Conv2d(4, 6, 3, padding=1, groups=2)
    ids, images, meter = torch.randint(9, (5, 7)), torch.randn(2, 4, 8, 8), CostMeter()
    alone = linear(ids)
    with torch.inference_mode(), meter.asking():
        assert linear(ids).equal(alone)
        convolution(images)
    spent = meter.take()
    assert spent["flops"] == 2 * 5 * 7 * (6 * 4 + 4 * 3) + 2 * 2 * 64 * (6 * 2 * 9)
    assert spent["asking"] > 0
    linear(ids)
    assert meter.take() == {}, "nothing is counted outside"


def test_operations_of_a_language_model_are_two_for_each_weight_and_token(llamas, transformers):
    model = transformers.AutoModelForCausalLM.from_pretrained(str(llamas / "base"))
    meter = CostMeter()
    with torch.inference_mode(), meter.asking():
        model(torch.tensor([[1, 5, 6, 7], [1, 2, 3, 4]]))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    if model.config.tie_word_embeddings:
        matrices += model.lm_head.weight.numel()
    assert meter.take()["flops"] == 2 * 8 * matrices


def test_a_call_that_fails_is_paid_for():
    meter = CostMeter()
    with pytest.raises(RuntimeError), meter.asking():
        raise RuntimeError
    assert set(meter.take()) == {"asking"}


def test_costs_are_added_by_part():
    assert add_costs({"a": 1.0, "b": 2.0}, {"b": 3.0, "c": 4.0}) == {"a": 1.0, "b": 5.0, "c": 4.0}


@pytest.mark.parametrize(("flops", "said"), [(3.21e12, "3.21 TFLOPs"), (5e8, "500 MFLOPs"), (2e18, "2 EFLOPs")])
def test_operations_are_shown_in_a_readable_unit(flops, said):
    assert show_flops(flops) == said


def test_the_store_adds_what_trials_cost_failed_ones_too(tmp_path):
    store = Store(tmp_path / "s.sqlite")
    answers = {"quiz": Answers(np.array([0, 1]), np.array([0.0, 1.0]))}
    store.add(Trial("candidate", "a", "done", 0, 0), answers, {"asking": 2.0, "flops": 10.0})
    store.add(Trial("candidate", "b", "failed", 0, 1), {}, {"asking": 1.0})
    store.add(Trial("test", "a", "done"), answers, {"merging": 0.5})
    store.close()
    assert Store(tmp_path / "s.sqlite", readonly=True).costs() == {
        "candidate": {"asking": 3.0, "flops": 10.0},
        "test": {"merging": 0.5},
    }


class Metered:
    """An evaluator whose questions have a price."""

    def __call__(self, candidate, items):
        self.spent = {"asking": float(sum(map(len, items.values()))), "merging": 1.0, "flops": 7.0}
        return World()(candidate, items)

    def take_costs(self):
        return self.spent


def test_a_study_tells_what_each_of_its_parts_cost(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(stability=3), Metered())
    cost = study.cost()
    parts = {part.name: part for part in cost.parts}
    assert parts["search"].models == cost.models
    assert parts["search"].flops == 7.0 * cost.models
    assert all(part.asking == part.questions and part.merging == part.models for part in cost.parts)
    assert cost.fitting > 0
    assert f"{cost.models} models" in cost.describe()
    assert show_flops(7.0 * sum(part.models for part in cost.parts)) in cost.describe()


def test_an_evaluator_that_does_not_tell_its_costs_leaves_them_out(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(), World())
    assert not any(part.asking for part in study.cost().parts)
    assert "FLOPs" not in study.cost().describe()


def with_trials(path, chosen, seconds, loading, count=1, items=20):
    """A study in which a few candidates have been evaluated."""
    store = Store(path)
    for position in range(count):
        answers = {"quiz": Answers(np.arange(items), np.ones(items))}
        costs = {"loading": loading if position == 0 else 0.0, "merging": 1.0, "asking": seconds - 1.0}
        spent = seconds + costs["loading"]
        store.add(Trial("candidate", f"{position}", "done", 0, position, seconds=spent), answers, costs)
    return forecast(store, chosen)


def test_the_forecast_does_not_count_loading_again(tmp_path):
    chosen = design()
    slow, quick = (with_trials(tmp_path / f"{loading}.sqlite", chosen, 5.0, loading) for loading in (100.0, 0.0))
    assert slow == quick
    # 31 candidates of 20 items; the winner and two endpoints on 40 test items each: 0.2 s an item, 1 s a merge
    assert slow.seconds == pytest.approx(31 * 5.0 + 3 * (1.0 + 40 * 0.2))
    assert (slow.trials, slow.evaluations) == (31, 31 * 20)


def test_the_forecast_counts_full_evaluations_at_the_end(tmp_path):
    found = with_trials(tmp_path / "s.sqlite", design(rerank=3, stability=2), 5.0, 0.0)
    assert found.seconds == pytest.approx(31 * 5.0 + 3 * (1.0 + 40 * 0.2) + 5 * (1.0 + 140 * 0.2))


def test_the_forecast_of_a_race_expects_what_racing_candidates_were_asked(tmp_path):
    chosen = design(race=5, starts=({"weight.math": 1.0, "weight.code": 0.0},))
    store = Store(tmp_path / "s.sqlite")
    for position, items in enumerate((20, 5, 10)):
        answers = {"quiz": Answers(np.arange(items), np.ones(items))}
        store.add(Trial("candidate", f"{position}", "done", 0, position, seconds=items * 0.1), answers)
    found = forecast(store, chosen)
    assert found.evaluations == round(29 * 7.5)
    assert found.seconds == pytest.approx(0.1 * (29 * 7.5 + 3 * 40))


def test_loading_is_no_part_of_the_pace(tmp_path):
    class Loads(Metered):
        loaded = False

        def take_costs(self):
            first, self.loaded = not self.loaded, True
            return self.spent | ({"loading": 1e-9} if first else {})

    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(), Loads())
    assert study.cost().loading == 1e-9
