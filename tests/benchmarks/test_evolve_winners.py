"""Searches on kept answers: full evaluation finds the planted best merge, few questions cost what they say."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.evolve_answers import Pool, Setting
from benchmarks.evolve_estimates import measure_estimates
from benchmarks.evolve_transfer import measure_transfer, ratio
from benchmarks.evolve_winners import FITNESS, fitted_once, lost, measure_winners, unseen
from merganser.evolve.space import key
from merganser.evolve.summary import negative_transfer

pytest.importorskip("pymoo")
SETTING = Setting(("a", "b"), 20, (0.0, 0.5, 1.0))


@pytest.fixture(scope="module")
def pool():
    """Two tasks of 20 items each; a merge's chance on a task grows with its expert's weight."""
    rng = np.random.default_rng(0)
    difficulty = rng.random(40)

    def answers(a, b):
        skill = np.repeat([0.4 + 0.5 * a, 0.4 + 0.5 * b], 20)
        return (skill > difficulty).astype(float)

    merges = np.array([answers(*point.values()) for point in SETTING.grid])
    others = np.array([answers(0, 0), answers(1, 0), answers(0, 1), answers(0.7, 0), answers(0, 0.3)])
    features = rng.normal(size=(2, 40, 8))
    return Pool(merges, others, ("base", "a", "b", "a early", "b early"), features, ("a",) * 20 + ("b",) * 20)


@pytest.fixture(scope="module")
def searched(pool):
    """Two short searches for each kind of fitness."""
    with fitted_once():
        return measure_winners(SETTING, pool, [8], range(2), 5, 2)


def test_winners(pool):
    with fitted_once():
        found = measure_winners(SETTING, pool, [8], range(2), 9, 3)
    full = found["fitness"]["full"]
    assert list(found["fitness"]) == ["full", *(f"{name} 8" for name in FITNESS)]
    assert full["score"] == found["grid"]["best"] == pool.merges.mean(1).max()
    assert full["saved"] == 1.0
    for name in FITNESS:
        row = found["fitness"][f"{name} 8"]
        assert row["saved_per_candidate"] == 4.0
        assert row["score"] <= full["score"]
        assert (row["calibration"] > 0) == (name != "mean")
        differences = [a["test"] - b["test"] for a, b in zip(full["runs"], row["runs"], strict=True)]
        assert row["loss"] == pytest.approx(np.mean(differences))


def test_winners_are_judged_on_items_their_search_never_saw(pool, searched):
    found = searched
    rows = {key(values): row for values, row in zip(SETTING.grid, pool.merges, strict=True)}
    assert found["unseen"]["items"] == 8
    for seed, run in enumerate(found["fitness"]["mean 8"]["runs"]):
        assert run["test"] == rows[key(SETTING.point(run["weights"]))][unseen(pool, seed)].mean()
        assert found["unseen"]["models"]["a"]["runs"][seed] == pool.others[1][unseen(pool, seed)].mean()


def test_what_is_lost_comes_with_the_error_of_its_mean():
    assert lost([0.5, 0.7], [0.4, 0.4]) == pytest.approx({"loss": 0.2, "loss_error": 0.1})


def test_a_rate_of_one_model_has_a_binomial_error():
    right = np.array([[True, False, True, True]])
    found = ratio(~right, np.ones_like(right))
    assert found == pytest.approx({"rate": 0.25, "error": (0.25 * 0.75 / 4) ** 0.5, "items": 4, "answers": 4})


def test_asking_the_same_items_again_makes_a_rate_no_surer():
    right = np.array([[True, False, True, True]])
    once, thrice = (ratio(~rows, np.ones_like(rows)) for rows in (right, right.repeat(3, 0)))
    assert thrice == pytest.approx(once | {"answers": 12})


def test_transfer(pool, searched):
    found = measure_transfer(SETTING, pool, {"winners": searched})
    endpoints = pool.endpoints(SETTING)
    for weight, row in found["equal_weights"].items():
        merged = pool.merges[SETTING.grid.index(SETTING.point([float(weight)] * 2))]
        assert row["all"]["rate"] == pytest.approx(negative_transfer(merged, endpoints))
        assert row["tasks"]["a"]["rate"] == pytest.approx(negative_transfer(merged[:20], endpoints[:, :20]))
    assert found["equal_weights"]["1.0"]["all"]["rate"] == 0, "a merge that can all that both can"
    assert found["endpoints"][found["best_endpoint"]]["best_endpoint"]["rate"] == 0
    assert set(found["winners"]["winners"]) == set(searched["fitness"])
    assert found["winners"]["winners"]["full"]["all"]["answers"] <= 2 * searched["unseen"]["items"]


def test_estimates(pool):
    found = measure_estimates(SETTING, pool, [8, 16], 2, 9, 0)
    assert found["merges"] == 4, "merges of more than one expert"
    naive = found["mae"]["16"]["random"]["naive"]
    assert 0 < naive < 0.3
    assert set(found["mae"]["8"]) == {"random", "stratified", "irt", "representation"}
    for size in ("8", "16"):
        free, prior = (found["ability"][size]["estimators"][name] for name in ("p-irt", "p-irt (map)"))
        assert prior["euclidean"] < free["euclidean"], "nothing holds an ability without a prior"
        assert 0 <= prior["probability"] <= 1
