"""Racing: fewer questions, the same winners, and the same study however often it is interrupted."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from synthetic_designs import design, two_objectives
from synthetic_world import ITEMS, World

from merganser.errors import InputError
from merganser.evolve.objectives import Objective
from merganser.evolve.racing import MARGIN, Race, rungs
from merganser.evolve.study import Study
from merganser.evolve.summary import summarize
from merganser.evolve.tasks import StudyTask

pytest.importorskip("pymoo")
WHOLE = {"quiz": StudyTask(ITEMS)}


@dataclass(frozen=True)
class Counting(World):
    """Counts the items it is asked, and is interrupted at one of its calls."""

    stop_at: int = 10**9
    asked: list[int] = field(default_factory=list)

    def __call__(self, candidate, items):
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(sum(map(len, items.values())))
        return super().__call__(candidate, items)


def essence(study):
    return [(t.generation, t.position, t.label, t.state, t.objectives, t.stopped) for t in study.trials()]


def answers(study):
    return [
        {m: (a.items.tolist(), a.values.tolist()) for m, a in study.store.answers(t).items()} for t in study.trials()
    ]


def test_rungs_double_up_to_all_items():
    assert rungs(5, 37) == (5, 10, 20, 37)
    assert rungs(5, 4) == (5,)
    parts = Race(4, (), ()).parts({"quiz": range(10), "exam": range(5)})
    assert [[len(chosen) for chosen in part.values()] for part in parts] == [[4, 4], [4, 1], [2]]


def test_candidates_that_are_better_are_seldom_stopped():
    """Known truth: items of all difficulties, and luck that candidate and incumbent share as merges do. Four looks at
    80 %, two-sided: at most 40 % of those that gain just the margin, few of those that gain much, most that lose."""
    rng = np.random.default_rng(0)
    rates = {}
    for gain in (-0.2, MARGIN, 0.15):
        stopped = 0
        for _ in range(150):
            p, luck = rng.beta(1.2, 1.2, 80), rng.random(80)
            other = np.where(rng.random(80) < 0.7, luck, rng.random(80))
            race = Race(5, ({"quiz": (luck < p).astype(float)},), (Objective.of("quiz"),))
            answers = (other < p + gain).astype(float)
            stopped += any(race.lost({"quiz": answers[:n]}) is not None for n in (5, 10, 20, 40))
        rates[gain] = stopped / 150
    assert rates[-0.2] > 0.8
    assert rates[MARGIN] < 0.4
    assert rates[0.15] < 0.15


def test_a_race_asks_less_and_finds_as_good_a_winner(tmp_path):
    found = {}
    for race in (0, 5):
        scores, asked = [], 0
        for seed in range(3):
            evaluate = Counting()
            with Study.open(tmp_path / f"{race}-{seed}.sqlite") as study:
                winner = study.run(design(tasks=WHOLE, seed=seed, race=race), evaluate)
                cost = summarize(study).cost
                asked += cost.asked + cost.again
                tested = sum(len(study.prepared()["quiz"].split.test) for _ in study.store.trials("test"))
                assert cost.asked + cost.again + tested == sum(evaluate.asked), "every question is counted"
                assert winner.stopped is None
            scores.append(np.mean(World()(winner.values, {"quiz": range(ITEMS)})["quiz"]))
        found[race] = np.mean(scores), asked
    assert found[5][0] > found[0][0] - 0.015
    assert found[5][1] < found[0][1] / 2


def test_stopped_candidates_are_estimated_by_what_they_lost_by(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(tasks=WHOLE, race=5), World())
    by_id = {trial.id: trial for trial in study.trials()}
    stopped = [trial for trial in study.trials() if trial.stopped is not None]
    assert stopped
    assert study.best().stopped is None
    pool = study.prepared()["quiz"].split.pool.tolist()
    for trial in stopped:
        rival = by_id[trial.stopped]
        assert rival.stopped is None
        assert rival.generation < trial.generation or trial.generation == 0
        assert trial.objectives["quiz"] < rival.objectives["quiz"] + MARGIN
        if trial.cached_from is None:
            own = study.store.answers(trial)["quiz"]
            assert len(own.items) < len(pool)
            assert set(own.items.tolist()) <= set(pool)
            gap = np.mean(own.values - World()(rival.values, {"quiz": own.items})["quiz"])
            assert trial.objectives["quiz"] == pytest.approx(rival.objectives["quiz"] + gap)


@pytest.mark.parametrize("make", [lambda: design(tasks=WHOLE, race=5), lambda: two_objectives(race=5)])
def test_an_interrupted_race_goes_on_as_if_nothing_had_been(tmp_path, make):
    whole = Study.open(tmp_path / "whole.sqlite")
    evaluate = Counting()
    whole.run(make(), evaluate)
    calls = len(evaluate.asked)
    study = Study.open(tmp_path / "parts.sqlite")
    for place in (3, calls // 3, calls // 2):
        new = study.store.get("design") is None
        go_on = partial(study.run, make()) if new else study.resume
        with pytest.raises(KeyboardInterrupt):
            go_on(Counting(stop_at=place))
    study.resume(World())
    assert essence(study) == essence(whole)
    assert answers(study) == answers(whole)
    assert any(trial.stopped is not None for trial in study.trials())


def test_workers_do_not_change_a_race(tmp_path):
    found = []
    for count in (1, 2):
        study = Study.open(tmp_path / f"{count}.sqlite")
        study.run(design(tasks=WHOLE, race=5, generations=2), World(), workers=count)
        trials = {trial.id: trial.label for trial in study.trials()}
        found.append([(t.label, t.objectives, trials.get(t.stopped)) for t in study.trials()])
    assert found[0] == found[1]


def test_a_race_needs_two_items():
    with pytest.raises(InputError, match="race: 1 items in the first rung; 2 or more"):
        design(race=1)
