"""Pareto fronts: by estimates, and again by full evaluations."""

from __future__ import annotations

import pytest
from synthetic_designs import two_objectives
from synthetic_world import ITEMS, World

from merganser.evolve.objectives import Objective
from merganser.evolve.ranking import find_reranked_front, pareto
from merganser.evolve.store import Trial
from merganser.evolve.study import Study

OBJECTIVES = (Objective.of("a"), Objective("p", {"p": 1.0}, maximize=False))


def trial(label, a, p, **changes):
    return Trial("candidate", label, "done", objectives={"a": a, "p": p}, **changes)


def test_full_evaluations_overrule_estimates():
    trials = [trial("x", 0.9, 1.0), trial("y", 0.5, 0.5), trial("z", 0.4, 0.9), trial("w", 2.0, 0.0, stopped=1)]
    assert [t.label for t in pareto(trials, OBJECTIVES)] == ["x", "y"]
    full = [trial("x", 0.4, 1.0), trial("y", 0.5, 0.5)]
    assert [t.label for t in find_reranked_front(trials, full, OBJECTIVES)] == ["y"]
    assert find_reranked_front(trials, [], OBJECTIVES) is None
    asked_all = [*full, trial("w", 0.6, 0.4)]
    assert [t.label for t in find_reranked_front(trials, asked_all, OBJECTIVES)] == ["w"], "no longer judged by a race"


def test_the_front_of_a_study_is_ranked_again(tmp_path):
    pytest.importorskip("pymoo")
    study = Study.open(tmp_path / "s.sqlite")
    study.run(two_objectives(rerank=2), World())
    pool = {name: prepared.split.pool for name, prepared in study.prepared().items()}
    front = study.pareto()
    assert front
    points = []
    for t in front:
        answers = World()(t.values, pool)
        points.append([sum(answers[name]) / len(pool[name]) for name in ("quiz", "exam")])
        assert set(study.test_scores(t)) >= {"quiz", "exam"}
    assert len(pool["quiz"]) < ITEMS
    assert not any(b[0] >= a[0] and b[1] >= a[1] and a != b for a in points for b in points)
