"""What a winner costs: differences are paired item by item, and the section says what the numbers say."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.evolve_costs import FULL_BEFORE, IRT_BEFORE, PARTS, WAYS, compare, describe_difference
from benchmarks.reporting import markdown
from benchmarks.reporting.parts import Text
from benchmarks.reporting.sections.evolution_costs import is_met, parts

SECONDS = dict.fromkeys(WAYS, 20.0) | {FULL_BEFORE: 100.0, IRT_BEFORE: 40.0, "race": 8.0, "race, soft": 16.0}


def one_run(way, answers, seed):
    costs = dict.fromkeys(PARTS, 1.0) | {"seconds": SECONDS[way], "asking": 3.0, "machinery": 0.5}
    counts = {"seed": seed, "questions": 50, "models": 20, "stopped": 0}
    gain = describe_difference(np.array(answers) - 0.5)
    told = {"values": {}, "answers": list(answers), "test": float(np.mean(answers)), "others": {"base": 0.5}}
    return told | {"gain": gain} | costs | counts


@pytest.fixture
def results():
    rng = np.random.default_rng(0)
    full = (rng.random((3, 40)) < 0.7).astype(float)
    runs = {name: [one_run(name, row, seed) for seed, row in enumerate(full)] for name in WAYS}
    runs["race"] = [one_run("race", np.where(np.arange(40) == 0, 0.0, row), seed) for seed, row in enumerate(full)]
    runs[FULL_BEFORE] = [one_run(FULL_BEFORE, np.zeros(40), 0)]
    found = compare(runs) | {
        "pool": 80,
        "trials": 24,
        "method": "ties",
        "fine_tuning": {"questions": {"base": 0.2, "questions_right": 0.8, "rate": 5e-5}},
    }
    return found, full


def test_losses_are_means_over_the_same_items(results):
    found, full = results
    assert found["unseen"] == 40
    assert found["ways"]["full"]["loss"] == 0
    assert found["ways"][FULL_BEFORE]["loss"] == 0, "its answers are those of full"
    assert found["ways"][FULL_BEFORE]["test"] == pytest.approx(full.mean())
    assert found["ways"]["race"]["loss"] == pytest.approx(full[:, 0].mean() / 40)
    low, high = found["ways"]["race"]["interval"]
    assert low <= found["ways"]["race"]["loss"] <= high
    assert found["ways"]["race"]["fewer_than_full"] == pytest.approx(12.5)
    assert found["ways"]["race"]["fewer_than_gmp_irt"] == pytest.approx(5)
    assert found["ways"]["race"]["models_per_hour"] == pytest.approx(3600 * 20 / 8)
    assert found["standard_error"] == pytest.approx((full.mean() * (1 - full.mean()) / 40) ** 0.5)


def test_the_section_says_whether_the_goal_is_met(results):
    found, _ = results
    assert is_met(found, "race")
    assert not is_met(found, "race, soft"), "2.5 times fewer than gmp-IRT"
    written = list(parts(found))
    texts = {part.text.split(":")[0]: part.text for part in written if isinstance(part, Text)}
    assert texts["Race"].endswith(": met.")
    assert texts["Race, soft"].endswith(": not met.")
    assert (
        "questions 20.0 → 80.0 %; learning rate 5e-05,"
        in texts["Whole studies, from opening the checkpoints to the winner"]
    )
    assert "nan" not in "\n".join(map(markdown.write, written))
