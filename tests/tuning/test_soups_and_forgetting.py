"""Greedy soups and the path between base and expert."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.errors import InputError
from merganser.tuning.forgetting import forgetting_path
from merganser.tuning.soups import greedy_soup


def model(value, count=0):
    return {"w": torch.tensor([value, 1.0]), "count": torch.tensor(count)}


def towards(target):
    return lambda state: -abs(float(state["w"][0]) - target)


@given(st.lists(st.floats(-5, 5, width=16), min_size=1, max_size=6), st.floats(-5, 5))
@settings(max_examples=60, deadline=None)
def test_greedy_soup_against_a_naive_one(values, target):
    models = {str(i): model(v, i) for i, v in enumerate(values)}
    soup, report = greedy_soup(models, score=towards(target))
    order = sorted(range(len(values)), key=lambda i: abs(torch.tensor([values[i]]).item() - target))
    chosen = [order[0]]
    for i in order[1:]:
        means = [torch.tensor([values[j] for j in c]).sum() / len(c) for c in (chosen, [*chosen, i])]
        if abs(means[1].item() - target) <= abs(means[0].item() - target):
            chosen.append(i)
    assert report.chosen == tuple(str(i) for i in chosen)
    assert float(soup["w"][0]) == pytest.approx(sum(values[i] for i in chosen) / len(chosen), abs=1e-5)
    assert report.score >= max(report.alone.values()) - 1e-12
    assert soup["count"] == order[0]


def test_soup_leaves_models_alone_and_rounds_once():
    models = {"a": {"w": torch.tensor([1.0]).bfloat16()}, "b": {"w": torch.tensor([1.0078125]).bfloat16()}}
    soup, report = greedy_soup(models, score=lambda state: 0.0)
    assert soup["w"].dtype == torch.bfloat16
    assert models["a"]["w"].item() == 1.0
    assert report.chosen == ("a", "b")
    json.dumps(report.to_dict(), allow_nan=False)
    with pytest.raises(InputError, match="at least one model"):
        greedy_soup({}, score=lambda state: 0.0)


def test_a_model_without_a_score_is_never_the_soup():
    models = {name: model(value) for name, value in (("broken", 9.0), ("a", 1.0), ("b", 2.0))}
    scores = {9.0: math.nan, 1.0: 0.5, 2.0: 0.6, 1.5: 0.7}
    _, report = greedy_soup(models, score=lambda state: scores.get(float(state["w"][0]), math.nan))
    assert report.chosen == ("b", "a")
    assert report.score == 0.7
    with pytest.raises(InputError, match="'broken' is NaN"):
        greedy_soup({"broken": models["broken"]}, score=lambda state: math.nan)


def curve(points):
    return lambda weights: points[round(float(weights["w"][0]) * 10)]


KEPT = [1.0, 0.99, 0.97, 0.95, 0.92, 0.85, 0.75, 0.6, 0.45, 0.3, 0.1]
LEARNED = [0.1, 0.3, 0.5, 0.65, 0.75, 0.82, 0.86, 0.88, 0.89, 0.9, 0.9]


def test_the_point_to_take():
    ends = (model(0.0), model(1.0))
    report = forgetting_path(*ends, kept=curve(KEPT), learned=curve(LEARNED))
    assert report.kept == tuple(KEPT)
    sums = [(k - 0.1) / 0.9 + (n - 0.1) / 0.8 for k, n in zip(KEPT, LEARNED, strict=True)]
    assert report.take == report.positions[sums.index(max(sums))]
    assert forgetting_path(*ends, kept=curve(KEPT), learned=curve(LEARNED), tolerance=0.05).take == 0.3
    assert forgetting_path(*ends, kept=curve(KEPT), learned=curve(LEARNED), tolerance=0.0).take == 0.0
    json.dumps(report.to_dict(), allow_nan=False)


def test_nothing_forgotten_or_nothing_learned():
    ends = (model(0.0), model(1.0))
    assert forgetting_path(*ends, kept=lambda w: 1.0, learned=curve(LEARNED)).take == 0.9
    assert forgetting_path(*ends, kept=curve(KEPT), learned=lambda w: 0.5).take == 0.0
    with pytest.raises(InputError, match="rise from 0 to 1"):
        forgetting_path(*ends, kept=curve(KEPT), learned=curve(LEARNED), positions=[0.5, 1.0])


def test_a_point_without_a_score_is_never_chosen():
    ends, best = (model(0.0), model(1.0)), 5
    gap = [math.nan if i == best else value for i, value in enumerate(KEPT)]
    assert forgetting_path(*ends, kept=curve(KEPT), learned=curve(LEARNED)).take == best / 10
    assert forgetting_path(*ends, kept=curve(gap), learned=curve(LEARNED)).take in (0.4, 0.6)
    for broken in ([math.nan, *KEPT[1:]], [*KEPT[:-1], math.nan]):
        with pytest.raises(InputError, match="the base and the expert must have scores"):
            forgetting_path(*ends, kept=curve(broken), learned=curve(LEARNED))
