"""Two skills in one model: what is tuned on the pool, and what the section says about it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.evolve_skills import EVOLVED, describe_model, tune
from benchmarks.reporting import markdown
from benchmarks.reporting.parts import Text
from benchmarks.reporting.sections.evolution_skills import parts

SKILLS = ("questions", "sources")


def row(*rights):
    return {name: (np.arange(40) < right).astype(float) for name, right in zip(SKILLS, rights, strict=True)}


def test_the_best_on_the_pool_is_asked_the_unseen_items():
    asked = []

    def ask(candidate, items):
        asked.append((candidate["t"], items))
        return {name: np.full(len(chosen), candidate["t"]) for name, chosen in items.items()}

    pool, unseen = {"questions": [0, 1], "sources": [2]}, {"questions": [5], "sources": [6, 7]}
    found = tune(ask, [{"t": 0.2}, {"t": 0.9}, {"t": 0.4}], pool, unseen)
    assert found.values == {"t": 0.9}
    assert (found.tried, found.pool) == (3, pytest.approx(0.9))
    assert [t for t, items in asked if items == unseen] == [0.9]


@pytest.fixture
def results():
    endpoints = {"questions": row(30, 10), "sources": row(10, 30)}
    winner = row(30, 30)
    models = {
        EVOLVED: {"values": {}, "tried": 24, "pool": 0.8},
        "TIES": {"values": {}, "tried": 24, "pool": 0.7},
        "questions": {"tried": 0},
        "sources": {"tried": 0},
    }
    answers = {EVOLVED: winner, "TIES": row(12, 12), **endpoints}
    return {
        "models": {name: each | describe_model(answers[name], winner, endpoints) for name, each in models.items()},
        "front": [{"values": {}} | describe_model(row(30, 20), winner, endpoints)],
        "pool": dict.fromkeys(SKILLS, 10),
        "unseen": dict.fromkeys(SKILLS, 40),
        "trials": 24,
        "seconds": 1.0,
        "fine_tuning": {name: {"base": 0.2, f"{name}_right": 0.8} for name in SKILLS},
    }


def test_gains_are_paired_and_transfer_counts_what_a_fine_tune_knows(results):
    models = results["models"]
    assert models[EVOLVED]["winner_gains"]["mean"]["value"] == 0
    assert models["TIES"]["winner_gains"]["mean"]["value"] == pytest.approx(18 / 40)
    assert models[EVOLVED]["transfer"]["all"]["rate"] == 0
    assert models["TIES"]["transfer"]["all"]["rate"] == pytest.approx(18 / 30)
    assert models["questions"]["transfer"]["tasks"]["sources"]["rate"] == pytest.approx(20 / 30)


def test_the_section_says_what_the_numbers_say(results):
    written = list(parts(results))
    texts = [part.text for part in written if isinstance(part, Text)]
    assert texts[1].endswith("better than TIES.")
    assert "a front of 1 on the pool" in texts[2]
    assert "nan" not in "\n".join(map(markdown.write, written))
    level = results["models"]["sources"]["winner_gains"]["mean"]
    level["value"] = 0.0
    texts = [part.text for part in parts(results) if isinstance(part, Text)]
    assert "the fine-tune for sources does: the search gained nothing" in texts[1]
