"""Studies on a synthetic world: resumed equals uninterrupted, nothing invalid wins, test items stay unseen."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from synthetic_designs import design, two_objectives
from synthetic_world import ITEMS, Deadly, World

from merganser.errors import InputError, MerganserError
from merganser.evolve.design import Design
from merganser.evolve.objectives import Objective
from merganser.evolve.preparation import Calibration
from merganser.evolve.schema import from_document, to_document
from merganser.evolve.searchers import ALGORITHMS
from merganser.evolve.space import SearchParameter
from merganser.evolve.study import Study
from merganser.evolve.tasks import StudyTask

pytest.importorskip("pymoo")


def essence(study):
    """What must not depend on interruptions, workers or clocks."""
    return [(t.generation, t.position, t.label, t.state, t.objectives, t.estimates) for t in study.trials()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    study = Study.open(tmp_path_factory.mktemp("study") / "s.sqlite")
    study.run(design(stability=4), World())
    return study


def test_the_winner_beats_the_endpoints_on_unseen_items(finished):
    winner = finished.best()
    score = finished.test_scores(winner)["quiz"]
    assert score > max(finished.test_scores(label)["quiz"] for label in ("math", "code"))
    everything = np.mean(World()(winner.values, {"quiz": range(ITEMS)})["quiz"])
    assert abs(score - everything) < 0.15


def test_test_items_are_disjoint_from_fitness_and_calibration(finished):
    prepared = finished.prepared()["quiz"]
    seen = set()
    for kind in ("candidate", "endpoint", "full"):
        for trial in finished.store.trials(kind):
            for answers in finished.store.answers(trial).values():
                seen |= set(answers.items.tolist())
    tested = {i for t in finished.store.trials("test") for i in finished.store.answers(t)["quiz"].items.tolist()}
    assert tested == set(prepared.split.test.tolist())
    assert not tested & seen
    assert seen == set(prepared.split.pool.tolist())
    assert len(prepared.estimator.irt.items) == len(prepared.split.pool)


def test_every_trial_keeps_its_answers_and_its_estimate(finished):
    prepared = finished.prepared()["quiz"]
    for trial in finished.trials():
        source = next(t for t in finished.trials() if t.id == (trial.cached_from or trial.id))
        answers = finished.store.answers(source)
        assert answers["quiz"].items.tolist() == prepared.items
        estimate = prepared.estimator(answers["quiz"].values, prepared.subset)
        assert trial.objectives["quiz"] == pytest.approx(estimate.value, abs=1e-12)


def test_stability_is_measured_on_merges(finished):
    full = finished.store.trials("full")
    assert len(full) == 4
    assert all(t.values is not None for t in full)
    assert finished.best().label in {t.label for t in full}


def test_the_same_values_are_evaluated_once(tmp_path):
    log = tmp_path / "log"
    space = {"weight": SearchParameter(0, 2, integer=True, per="model")}
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(space=space, tasks={"quiz": StudyTask(ITEMS, subset=20)}), World(log=str(log)))
    searched = log.read_text().split()[:-3]  # the winner and the endpoints come again for the test
    assert len(searched) == len(set(searched)) <= 9
    assert len(study.trials()) > 9
    assert any(t.cached_from for t in study.trials())


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from synthetic_designs import design
from synthetic_world import World
from merganser.evolve.study import Study
Study.open({path!r}).run(design(stability=4), World(slow=0.05))
"""


@pytest.mark.parametrize("after", [1, 14])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, finished, after):
    path = tmp_path / "s.sqlite"
    script = SCRIPT.format(folder=str(Path(__file__).parent), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and _count(path) > after:  # a second process reads while the first writes
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    resumed = Study.open(path)
    assert len(resumed.trials()) < 32
    resumed.resume(World())
    assert essence(resumed) == essence(finished)
    assert resumed.test_scores(resumed.best()) == finished.test_scores(finished.best())


def _count(path):
    try:
        study = Study.open(path, readonly=True)
    except InputError:
        return 0
    try:
        return len(study.store.trials())
    except sqlite3.Error:
        return 0
    finally:
        study.close()


def test_workers_change_nothing_and_a_dead_one_is_replaced(tmp_path, finished):
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(stability=4), World(die_once=str(tmp_path / "died")), workers=2)
    assert (tmp_path / "died").exists()
    assert essence(study) == essence(finished)
    assert max(t.attempts for t in study.trials()) == 2
    assert len({t.worker for t in study.trials()}) > 1


def test_a_worker_that_always_dies_fails_its_trial_only(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    small = design(population=5, generations=1, tasks={"quiz": StudyTask(ITEMS, subset=20)})
    study.run(small, Deadly(), workers=2)
    states = {t.state: t for t in study.trials()}
    assert set(states) == {"done", "failed"}
    assert "the worker died" in states["failed"].error


def test_a_failing_evaluator_fails_its_trial_not_the_study(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    winner = study.run(design(), World(fail_above=0.8))
    failed = [t for t in study.trials() if t.state == "failed"]
    assert failed
    assert all(t.values["weight.math"] > 0.8 and "ValueError: this merge answers nonsense" in t.error for t in failed)
    assert winner.values["weight.math"] <= 0.8
    assert len(study.trials()) == 32


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({}, "no answers for task 'quiz'"),
        ({"quiz": [1.0]}, "1 answers for the 20 items"),
        ({"quiz": [np.nan] * 20}, "not finite"),
        ({"quiz": [1.0] * 20, "quizz": [1.0] * 20}, "not a task of this study"),
    ],
)
def test_senseless_answers_fail_the_trial(tmp_path, reply, message):
    study = Study.open(tmp_path / "s.sqlite")
    plain = design(tasks={"quiz": StudyTask(ITEMS, subset=20)}, population=5, generations=1)
    with pytest.raises(MerganserError, match=f"failed for the same reason: .*{message}"):
        study.run(plain, lambda candidate, items: reply)
    assert all(message in t.error for t in study.trials())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_a_study_and_violations_never_win(tmp_path, name):
    algorithm = ALGORITHMS[name]
    constraints = ("weight.math + weight.code <= 1.5",) if algorithm.constraints else ()
    make = two_objectives if algorithm.many else design
    tasks = {} if algorithm.many else {"tasks": {"quiz": StudyTask(ITEMS, subset=20)}}
    study = Study.open(tmp_path / "s.sqlite")
    study.run(make(constraints=constraints, algorithm=name, generations=4, **tasks), World())
    assert sum(t.state != "infeasible" for t in study.trials()) == 32
    winners = study.pareto() if algorithm.many else [study.best()]
    assert winners
    if constraints:
        assert any(t.state == "infeasible" for t in study.trials())
        assert all(t.values["weight.math"] + t.values["weight.code"] <= 1.5 for t in winners)
        infeasible = [t for t in study.trials() if max(t.violations) > 0]
        assert all(t.state == "infeasible" and not study.store.answers(t) for t in infeasible)
    before = essence(study)
    study.resume(World())  # replays without evaluating
    assert essence(study) == before


def test_algorithms_without_constraints_refuse_them_before_any_work():
    with pytest.raises(InputError, match="CMA-ES does not support constraints"):
        design(constraints=("weight.math <= 1",), algorithm="cmaes")


def test_two_objectives_give_the_true_pareto_set_of_what_was_tried(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    assert study.run(two_objectives(), World()) is None
    front = study.pareto()
    points = {t.label: (t.objectives["quiz"], t.objectives["exam"]) for t in study.trials()}

    def dominated(p):
        return any(q[0] >= p[0] and q[1] >= p[1] and q != p for q in points.values())

    assert {t.label for t in front} == {label for label, p in points.items() if not dominated(p)}
    assert all(study.test_scores(t) for t in front)
    assert study.best("exam").objectives["exam"] == max(p[1] for p in points.values())
    with pytest.raises(InputError, match="several objectives"):
        study.best()


def test_other_measures_can_be_minimised(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    shorter = Objective("score", {"quiz": 1.0, "quiz.length": -0.05})
    study.run(design(objectives=(shorter,), tasks={"quiz": StudyTask(ITEMS, subset=20)}), World())
    trial = study.best()
    measures = {m: e.value for m, e in trial.estimates.items()}
    assert trial.objectives["score"] == pytest.approx(measures["quiz"] - 0.05 * measures["quiz.length"])


@pytest.mark.parametrize(
    ("extractor", "c"),
    [
        ("random", 0.5),
        ("stratified", "adaptive"),
        ("irt", "bias-variance"),
        ("representation", "adaptive"),
        ("representation", 0.5),
        ("irt", 0.5),
    ],
)
def test_every_extractor_and_blend(tmp_path, extractor, c):
    rng = np.random.default_rng(0)
    strata = tuple(range(4)) * (ITEMS // 4) if extractor == "stratified" else None
    task = StudyTask(ITEMS, subset=20, extractor=extractor, estimator="gmp-irt", c=c, strata=strata)
    known = Calibration((rng.random((6, ITEMS)) < 0.5).astype(float), embeddings=(rng.normal(size=(ITEMS, 8)),))
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(tasks={"quiz": task}, population=5, generations=1), World(), calibration={"quiz": known})
    prepared = study.prepared()["quiz"]
    assert 0 <= prepared.estimator.c <= 1
    assert len(prepared.subset) == 20
    assert prepared.estimator.irt.abilities.shape[0] == 8


def test_an_irt_of_the_items_replaces_the_fit(tmp_path, finished):
    from merganser.evolve.irt import IRT, Items, Normal

    rng = np.random.default_rng(0)
    irt = IRT(
        np.zeros((0, 2)), Items(rng.normal(size=(ITEMS, 2)), rng.normal(size=ITEMS)), Normal(np.zeros(2), np.ones(2))
    )
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(population=5, generations=1), World(), calibration={"quiz": Calibration(irt=irt)})
    prepared = study.prepared()["quiz"]
    np.testing.assert_array_equal(prepared.estimator.irt.items.difficulty, irt.items.difficulty[prepared.split.pool])


def test_forecast_comes_before_the_search_and_shrinks(tmp_path):
    events = []
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(), World(slow=0.002), on_event=events.append)
    forecasts = [e.forecast for e in events if e.forecast]
    assert forecasts[0].trials == 32
    assert forecasts[0].evaluations == 32 * 20
    assert forecasts[0].seconds > 0
    assert forecasts[-1].trials == 0
    assert [e.phase for e in events][-1] == "done"
    assert {e.phase for e in events} == {"calibrate", "search", "test", "done"}


def test_a_design_survives_the_store():
    space = {
        "method": SearchParameter(choices=("ties", "linear")),
        "weight": SearchParameter(0, 2, per="model", groups={"mlp": "*mlp*"}, points=3),
    }
    original = two_objectives(space=space, algorithm="rnsga2", reference_points=((0.5, 0.5),))
    assert from_document(Design, to_document(original)) == original


def test_running_twice_and_running_nothing(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    with pytest.raises(InputError, match="empty study"):
        study.resume(World())
    study.run(design(population=5, generations=1), World())
    with pytest.raises(InputError, match="already contains a study"):
        study.run(design(), World())
    with pytest.raises(InputError, match="no such study"):
        Study.open(tmp_path / "absent.sqlite", readonly=True)
    (tmp_path / "text").write_text("this is not a database, however long it may be" * 100)
    with pytest.raises(InputError, match="not a study"):
        Study.open(tmp_path / "text")


def test_a_study_that_runs_is_not_run_again_meanwhile(tmp_path):
    path, refused = tmp_path / "s.sqlite", []

    class Twice(World):
        def __call__(self, candidate, items):
            if not refused:
                with Study.open(path) as second, pytest.raises(InputError, match="another process is writing there"):
                    second.resume(World())
                refused.append(True)
            return super().__call__(candidate, items)

    with Study.open(path) as study:
        study.run(design(), Twice())
        assert refused
        assert study.ended
        assert study.failure is None
        study.resume(World())  # the lock has been released
    assert [each.name for each in tmp_path.iterdir()] == ["s.sqlite"]


def test_a_store_that_does_not_replay_is_refused(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(population=5, generations=2), World())
    study.store._connection.execute(
        "UPDATE trials SET content = json_set(content, '$.label', 'x') WHERE generation = 1 AND position = 0"
    )
    with pytest.raises(MerganserError, match="does not replay"):
        study.resume(World())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stability": -1}, "stability: -1"),
        ({"seed": -1}, "seed: -1"),
        ({"seed": 99999999999}, "seed: 99999999999"),
        ({"objectives": (Objective.of("quiz"), Objective("quiz", {"quiz": 2.0}))}, "two objectives are called 'quiz'"),
    ],
)
def test_designs_that_could_not_end_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        design(**changes)


@pytest.mark.parametrize("points", [((0.5,),), ((0.5, 0.5), (0.5,)), ((0.5, np.nan),), ()])
def test_reference_points_that_are_none(points):
    with pytest.raises(InputError, match="one finite number for each of the 2 objectives"):
        two_objectives(algorithm="rnsga2", reference_points=points)


def test_objectives_and_tasks_that_are_none():
    with pytest.raises(InputError, match="name at least one"):
        Objective("x", {})
    with pytest.raises(InputError, match="finite number, not nan"):
        Objective("x", {"quiz": float("nan")})
    with pytest.raises(InputError, match=r"quiz\.a: a task's name must not contain a dot"):
        design(tasks={"quiz.a": StudyTask(20)}, objectives=(Objective.of("quiz.a"),))
    with pytest.raises(InputError, match="between 1 and 15 dimensions, not 99"):
        StudyTask(20, dimensions=99)
    with pytest.raises(InputError, match="items: 0; give the number of items"):
        StudyTask()


@pytest.mark.parametrize("reply", [dict.fromkeys(range(20), 0.0), "1" * 20, set(range(20))])
def test_answers_of_another_shape_fail_the_trial(tmp_path, reply):
    study = Study.open(tmp_path / "s.sqlite")
    plain = design(tasks={"quiz": StudyTask(ITEMS, subset=20)}, population=5, generations=1)
    with pytest.raises(MerganserError, match="answers to 'quiz' are a list of numbers, one for each item asked"):
        study.run(plain, lambda candidate, items: {"quiz": reply})


def test_irt_takes_answers_between_0_and_1_only(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    with pytest.raises(MerganserError, match=r"answers to 'quiz' from 3 to 3: IRT needs them in \[0, 1\]"):
        study.run(design(), lambda candidate, items: {"quiz": [3.0] * len(items["quiz"])})
    plain = design(tasks={"quiz": StudyTask(ITEMS, subset=20)}, population=5, generations=1)
    other = Study.open(tmp_path / "t.sqlite")
    assert other.run(plain, lambda candidate, items: {"quiz": [3.0] * len(items["quiz"])}).objectives["quiz"] == 3


def test_a_study_that_was_stopped_before_its_first_candidate_says_so(tmp_path):
    def stopped(candidate, items):
        raise KeyboardInterrupt

    study = Study.open(tmp_path / "s.sqlite")
    with pytest.raises(KeyboardInterrupt):
        study.run(design(population=5, generations=1), stopped)
    with pytest.raises(MerganserError, match=r"evaluated yet: wait for the run, or resume it"):
        study.best()
    study.resume(World())
    assert study.best().valid


def test_a_study_of_failures_says_why_and_is_tried_again(tmp_path):
    plain = design(tasks={"quiz": StudyTask(ITEMS, subset=20)}, population=5, generations=2)
    study = Study.open(tmp_path / "s.sqlite")
    with pytest.raises(
        MerganserError, match="failed for the same reason: ValueError: this merge answers nonsense; fix it"
    ):
        study.run(plain, World(fail_above=-1))
    assert "answers nonsense" in study.failure
    with pytest.raises(MerganserError, match="answers nonsense"):
        study.best()
    study.resume(World())
    assert study.failure is None
    assert study.ended
    whole = Study.open(tmp_path / "t.sqlite")
    whole.run(plain, World())
    assert essence(study) == essence(whole)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (Calibration(answers=np.full((2, ITEMS), 7.0)), r"answers lie in \[0, 1\]; found 7 to 7"),
        (Calibration(answers=np.zeros((2, 3))), "covers 3 items"),
        (Calibration(answers=np.zeros((2, 3, 4))), "not an array of shape"),
    ],
)
def test_calibration_is_checked_before_the_study_begins(tmp_path, known, message):
    study = Study.open(tmp_path / "s.sqlite")
    small = design(population=5, generations=1)
    with pytest.raises(InputError, match=message):
        study.run(small, World(), calibration={"quiz": known})
    with pytest.raises(InputError, match="'quizz', which is not a task; did you mean 'quiz'"):
        study.run(small, World(), calibration={"quizz": known})
    task = StudyTask(ITEMS, subset=20, extractor="representation")
    with pytest.raises(InputError, match="needs embeddings"):
        study.run(design(tasks={"quiz": task}, population=5, generations=1), World())
    assert study.run(small, World()) is not None


def test_a_measure_that_is_not_reported_ends_the_search_at_once(tmp_path):
    log = tmp_path / "log"
    study = Study.open(tmp_path / "s.sqlite")
    shorter = Objective("short", {"quiz.lenght": 1.0})
    plain = design(objectives=(shorter,), tasks={"quiz": StudyTask(ITEMS, subset=20)})
    with pytest.raises(MerganserError, match=r"the evaluator reports no 'quiz\.lenght'; did you mean 'quiz\.length'\?"):
        study.run(plain, World(log=str(log)))
    assert len(log.read_text().splitlines()) == 1
    assert "quiz.lenght" in study.failure


class FailsFrom(World):
    """Fails every candidate after so many calls, all in the same way."""

    calls = 0
    healthy = 0

    def __call__(self, candidate, items):
        type(self).calls += not isinstance(candidate, str)
        if not isinstance(candidate, str) and type(self).calls > type(self).healthy:
            raise OSError("the disk is full")
        return super().__call__(candidate, items)


@pytest.mark.parametrize("healthy", [0, 8])
def test_a_generation_that_fails_alike_stops_the_study_and_is_tried_again(tmp_path, monkeypatch, healthy):
    monkeypatch.setattr(FailsFrom, "calls", 0)
    monkeypatch.setattr(FailsFrom, "healthy", healthy)
    study = Study.open(tmp_path / "s.sqlite")
    with pytest.raises(
        MerganserError, match=r"every candidate of generation \d failed for the same reason: OSError: the disk is full"
    ):
        study.run(design(), FailsFrom())
    assert len(study.trials()) == healthy + 8, "no generation after it is tried"
    plain = Study.open(tmp_path / "plain.sqlite")
    winner = plain.run(design(), World())
    assert study.resume(World()).values == winner.values
