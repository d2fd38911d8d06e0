"""Searches on kept answers: full evaluation finds the planted best merge, few questions cost what they say."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.evolve_answers import Pool, Setting
from benchmarks.evolve_estimates import measure_estimates
from benchmarks.evolve_winners import FITNESS, fitted_once, measure_winners

pytest.importorskip("pymoo")
SETTING = Setting(("a", "b"), 20, (0.0, 0.5, 1.0))


@pytest.fixture
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


def test_estimates(pool):
    found = measure_estimates(SETTING, pool, [8, 16], 2, 9, 0)
    assert found["merges"] == 4, "merges of more than one expert"
    naive = found["mae"]["16"]["random"]["naive"]
    assert 0 < naive < 0.3
    assert set(found["mae"]["8"]) == {"random", "stratified", "irt", "representation"}
