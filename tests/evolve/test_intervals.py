"""Intervals hold what they promise, and winners are not announced without evidence."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest
from synthetic_designs import design
from synthetic_world import ITEMS, World

from merganser.evolve.intervals import (
    gain_over_best,
    objective_interval,
    paired_interval,
    score_interval,
    standard_error,
)
from merganser.evolve.objectives import Objective
from merganser.evolve.study import Study
from merganser.evolve.summary import compare_winner, describe_comparison
from merganser.evolve.tasks import StudyTask

QUIZ = Objective.of("quiz")


@pytest.mark.parametrize(("right", "count"), [(0, 10), (10, 10), (7, 20), (199, 200)])
def test_scores_have_wilsons_interval(right, count):
    found = score_interval(np.array([1.0] * right + [0.0] * (count - right)))
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert standard_error(np.ones(30)) > 0.02, "a perfect score is no certainty"


@pytest.mark.parametrize("right", [0, 3, 20])
def test_an_objective_of_one_measure_has_the_interval_of_its_score(right):
    answers = np.array([1.0] * right + [0.0] * (20 - right))
    found, score = objective_interval(QUIZ, {"quiz": answers}), score_interval(answers)
    assert (found.value, found.low, found.high) == pytest.approx((score.value, score.low, score.high))
    halved = objective_interval(Objective("half", {"quiz": -0.5}), {"quiz": answers})
    assert (halved.low, halved.high) == pytest.approx((-score.high / 2, -score.low / 2))


@pytest.mark.parametrize("chances", [(0.5, 0.7), (0.9, 0.97)])
def test_intervals_of_weighted_sums_hold_the_truth_and_stay_in_range(chances):
    rng = np.random.default_rng(0)
    mean, truth = Objective("mean", {"a": 0.5, "b": 0.5}), sum(chances) / 2
    inside = []
    for _ in range(2000):
        answers = {name: (rng.random(40) < p).astype(float) for name, p in zip("ab", chances, strict=True)}
        found = objective_interval(mean, answers)
        assert 0 <= found.low <= found.value <= found.high <= 1 + 1e-12
        inside.append(found.low <= truth <= found.high)
    assert 0.93 <= np.mean(inside) <= 0.975


@pytest.mark.parametrize("count", [25, 60, 200])
@pytest.mark.parametrize("difference", [0.0, 0.1])
def test_paired_intervals_hold_the_true_difference_95_times_in_100(count, difference):
    rng = np.random.default_rng(count)
    inside = []
    for _ in range(2000):
        hard = rng.random(count)  # what makes an item hard for both
        left = (rng.random(count) < np.clip(0.6 + difference + 0.6 * (hard - 0.5), 0, 1)).astype(float)
        right = (rng.random(count) < np.clip(0.6 + 0.6 * (hard - 0.5), 0, 1)).astype(float)
        found = paired_interval(QUIZ, {"quiz": left}, {"quiz": right})
        inside.append(found.low <= difference <= found.high)
    assert 0.93 <= np.mean(inside) <= 0.975


@pytest.mark.parametrize("number", [1, 2, 4])
def test_the_best_of_several_equal_models_is_not_lucky(number):
    rng = np.random.default_rng(number)
    found = []
    for _ in range(2000):
        hard = rng.random(48)  # what makes an item hard for all
        own, *others = ({"quiz": (rng.random(48) < 0.7 + 0.6 * (hard - 0.5)).astype(float)} for _ in range(number + 1))
        found.append(gain_over_best(QUIZ, own, {str(label): each for label, each in enumerate(others)})[1])
    assert 0.93 <= np.mean([each.low <= 0 <= each.high for each in found]) <= 0.985
    assert np.mean([each.verdict == "worse" for each in found]) <= 0.035


def test_models_that_are_alike_are_seldom_told_apart():
    rng = np.random.default_rng(0)
    verdicts = [
        paired_interval(QUIZ, *({"quiz": (rng.random(40) < 0.7).astype(float)} for _ in range(2))).verdict
        for _ in range(1000)
    ]
    assert verdicts.count("cannot tell") > 930


def test_few_items_are_no_proof_and_many_are():
    def verdict(left, right, objective=QUIZ):
        return paired_interval(objective, {"quiz": np.array(left)}, {"quiz": np.array(right)}).verdict

    assert verdict([1.0] * 2, [0.0] * 2) == "cannot tell"
    assert verdict([1.0] * 30, [0.0] * 30) == "better"
    assert verdict([0.0] * 30, [1.0] * 30) == "worse"
    assert (
        verdict([2.0, 2.1, 2.2] * 9, [3.0, 3.2, 3.3] * 9, Objective("quiz", {"quiz": 1.0}, maximize=False)) == "better"
    )


def test_differences_of_several_tasks_add_up():
    rng = np.random.default_rng(0)
    both = Objective("both", {"a": 0.25, "b": 0.75})
    left, right = ({"a": rng.integers(0, 2, 50) * 1.0, "b": rng.integers(0, 2, 20) * 1.0} for _ in range(2))
    found = paired_interval(both, left, right)
    assert found.value == pytest.approx(0.25 * (left["a"] - right["a"]).mean() + 0.75 * (left["b"] - right["b"]).mean())


class Noisy(World):
    """Candidates whose answers hold a good deal of chance: subsets mislead."""

    def __call__(self, candidate, items):
        answers = super().__call__(candidate, items)
        return {"quiz": answers["quiz"]}


def test_the_best_few_are_ranked_again_on_the_whole_pool(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    winner = study.run(design(tasks={"quiz": StudyTask(ITEMS, subset=6)}, rerank=4), Noisy())
    pool = study.prepared()["quiz"].split.pool
    first = sorted({t.label: t for t in study.trials()}.values(), key=lambda t: -t.objectives["quiz"])
    cut = first[3].objectives["quiz"]
    full = study.store.trials("full")
    assert len(full) == 4
    assert all(t.objectives["quiz"] >= cut for t in study.trials() if t.label in {f.label for f in full})
    scores = {f.label: np.mean(Noisy()(f.values, {"quiz": pool})["quiz"]) for f in full}
    assert scores[winner.label] == max(scores.values())
    assert study.best().label == winner.label
    assert study.test_scores(winner) is not None


def test_a_full_subset_is_not_evaluated_twice(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(tasks={"quiz": StudyTask(ITEMS)}, rerank=4, generations=1), World())
    assert study.store.trials("full") == []


def test_what_is_said_of_the_winner(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    winner = study.run(design(), World())
    label, gain = compare_winner(study, QUIZ, winner)
    scores = {name: study.test_scores(name)["quiz"] for name in ("math", "code")}
    assert label == max(scores, key=scores.get)
    assert gain.value == pytest.approx(study.test_scores(winner)["quiz"] - scores[label])
    assert ("cannot tell" in describe_comparison(study, QUIZ, winner)) == (gain.low <= 0 <= gain.high)
