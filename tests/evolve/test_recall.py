"""A candidate is asked no item twice: full evaluations take over what it answered in the search."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from synthetic_designs import design, two_objectives
from synthetic_world import ITEMS, World

from merganser.evolve.recall import count_answers, mean_scores, missing_items, recall
from merganser.evolve.space import key
from merganser.evolve.store import Answers
from merganser.evolve.study import Study
from merganser.evolve.tasks import StudyTask
from merganser.evolve.workers import Job, Outcome

pytest.importorskip("pymoo")


class Asking(World):
    """Counts how often each candidate is asked each item."""

    asked: ClassVar[Counter] = Counter()

    def __call__(self, candidate, items):
        label = candidate if isinstance(candidate, str) else key(candidate)
        self.asked.update((label, task, item) for task, chosen in items.items() for item in chosen)
        return super().__call__(candidate, items)


@pytest.mark.parametrize("chosen", [design(rerank=3), design(stability=4, race=5), two_objectives(rerank=2)])
def test_no_item_is_asked_twice_and_every_question_is_counted(tmp_path, chosen):
    Asking.asked.clear()
    with Study.open(tmp_path / "s.sqlite") as study:
        study.run(chosen, Asking())
        full, cost = study.store.trials("full"), study.cost()
        pools = {name: prepared.split.pool.tolist() for name, prepared in study.prepared().items()}
        for trial in full:
            answers = study.store.answers(trial)
            expected = World()(trial.values, pools)
            assert all(answers[m].items.tolist() == pools[m.split(".")[0]] for m in answers)
            assert all(answers[m].values.tolist() == pytest.approx(expected[m]) for m in expected)
            assert trial.objectives == pytest.approx({m: np.mean(values) for m, values in expected.items()})
    assert full
    candidates = Counter({place: n for place, n in Asking.asked.items() if place[0] not in chosen.models})
    assert set(candidates.values()) == {1}
    tested = sum(item not in set(pools[task]) for _, task, item in candidates)
    assert cost.asked + cost.again == len(candidates) - tested
    assert 0 < cost.again < sum(map(len, pools.values())) * len(full)


def test_what_was_asked_entirely_is_not_asked_again(tmp_path):
    Asking.asked.clear()
    with Study.open(tmp_path / "s.sqlite") as study:
        study.run(design(tasks={"quiz": StudyTask(ITEMS)}, stability=3, generations=1), Asking())
        assert len(study.store.trials("full")) == 3
        assert study.cost().again == 0
    assert set(Asking.asked.values()) == {1}


def test_failed_outcomes_stay_failed():
    failed = Outcome(Job(0, "math", {}), None, "no memory", 0.0, "1", {})
    assert recall(failed, {"quiz": Answers(np.array([1]), np.array([1.0]))}) is failed


def test_answers_join_by_measure_and_tasks_without_missing_items_are_left_out():
    known = {name: Answers(np.array([5]), np.array([1.0])) for name in ("quiz", "quiz.soft", "exam")}
    assert missing_items({"quiz": [3, 5, 8], "exam": [5]}, known) == {"quiz": [3, 8]}
    assert count_answers(known) == 2
    asked = Outcome(Job(0, "math", {}), {"quiz": [0.0, 1.0], "quiz.soft": [0.2, 0.9]}, None, 0.0, "1", {"quiz": [3, 8]})
    whole = recall(asked, known)
    assert whole.items == {"quiz": [3, 8, 5], "exam": [5]}
    assert whole.answers == {"quiz": [0.0, 1.0, 1.0], "quiz.soft": [0.2, 0.9, 1.0], "exam": [1.0]}
    assert mean_scores(known) == ({"quiz": 1.0, "quiz.soft": 1.0, "exam": 1.0}, {})
