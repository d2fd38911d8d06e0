from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.stats import spearmanr
from synthetic_designs import design, two_objectives
from synthetic_world import ITEMS, World

from merganser.evolve.objectives import Objective
from merganser.evolve.schema import to_document
from merganser.evolve.store import Trial
from merganser.evolve.study import Study
from merganser.evolve.summary import convergence, negative_transfer, summarize
from merganser.evolve.tasks import StudyTask

pytest.importorskip("pymoo")


@settings(max_examples=40, deadline=None)
@given(arrays.arrays(np.int8, (4, 12), elements=st.integers(0, 1)))
def test_negative_transfer_rate_is_the_thesis_definition(answers):
    merged, endpoints = answers[0].astype(float), answers[1:].astype(float)
    known = [i for i in range(12) if any(endpoints[j][i] == 1 for j in range(3))]
    lost = [i for i in known if merged[i] == 0]
    expected = len(lost) / len(known) if known else float("nan")
    assert negative_transfer(merged, endpoints) == pytest.approx(expected, nan_ok=True)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    opened = Study.open(tmp_path_factory.mktemp("study") / "s.sqlite")
    opened.run(design(stability=6), World())
    return opened


def agresti_coull(answers):
    p = (answers.sum() + 2) / (len(answers) + 4)
    return (p * (1 - p) / (len(answers) + 4)) ** 0.5


def test_a_summary_of_one_objective(study):
    summary = summarize(study)
    (winner,) = summary.winners
    world = World()
    test = study.prepared()["quiz"].split.test
    answers = np.array(world(winner.trial.values, {"quiz": test})["quiz"])
    assert winner.test["quiz"] == answers.mean()
    assert winner.errors["quiz"] == pytest.approx(agresti_coull(answers))
    endpoints = np.array([world(label, {"quiz": test})["quiz"] for label in ("math", "code")])
    assert winner.negative_transfer["quiz"] == negative_transfer(answers, endpoints)

    assert winner.objectives == {"quiz": winner.test["quiz"]}
    assert winner.objective_errors["quiz"] == pytest.approx(winner.errors["quiz"])
    assert winner.items["quiz"] == len(test)
    for label, row in zip(("math", "code"), endpoints, strict=True):
        assert summary.endpoints[label].test["quiz"] == row.mean()
        assert summary.endpoints[label].errors["quiz"] == pytest.approx(agresti_coull(row))

    line = summary.convergence["quiz"]
    assert len(line) == 4
    assert list(line) == sorted(line)
    assert line[-1] == study.best().objectives["quiz"]

    evaluated = sum(t.cached_from is None for t in study.trials())
    assert summary.cost.asked == 20 * evaluated
    assert summary.cost.full == 160 * evaluated
    assert summary.cost.calibration == 2 * 160
    assert summary.cost.models == evaluated
    assert summary.cost.models_per_hour == pytest.approx(3600 * evaluated / summary.cost.search_seconds)
    assert summary.cost.seconds > summary.cost.search_seconds
    assert summary.cost.saved == pytest.approx(summary.cost.full / (summary.cost.asked + 320 + 6 * (160 - 20)))


def test_the_estimator_is_judged_by_merges_that_were_fully_evaluated(study):
    (agreement,) = summarize(study).agreement
    pool = study.prepared()["quiz"].split.pool
    estimates = {t.label: t.objectives["quiz"] for t in study.trials()}
    pairs = [
        (np.mean(World()(t.values, {"quiz": pool})["quiz"]), estimates[t.label]) for t in study.store.trials("full")
    ]
    truth, guess = np.array(pairs).T
    assert agreement.merges == 6
    assert agreement.error == pytest.approx(np.abs(truth - guess).mean())
    assert agreement.spearman == pytest.approx(spearmanr(truth, guess).statistic)
    assert set(agreement.epsilon) == {"naive", "p-irt", "gp-irt", "mp-irt", "gmp-irt"}
    assert agreement.used == "gmp-irt"


def test_json_is_plain(study):
    import json

    assert json.loads(json.dumps(to_document(summarize(study))))["states"]["done"] == 32


class Tables:
    """A page that keeps its tables and texts."""

    def __init__(self):
        self.tables, self.texts = [], []

    def heading(self, text): ...

    def chart(self, chart): ...

    def text(self, text):
        self.texts.append(text)

    def table(self, columns, rows, caption=""):
        self.tables.append((list(columns), [list(row) for row in rows]))

    def figure(self, figure, caption=""): ...


def test_convergence_leaves_out_what_a_race_stopped():
    values = {"label": "x", "state": "done", "generation": 0}
    whole = Trial("candidate", objectives={"quiz": 0.5}, id=1, **values)
    stopped = Trial("candidate", objectives={"quiz": 0.52}, stopped=1, **values)
    study = SimpleNamespace(design=SimpleNamespace(objectives=(Objective.of("quiz"),)), trials=lambda: [whole, stopped])
    assert convergence(study) == {"quiz": (0.5,)}


def test_a_page_shows_the_objective_with_its_error_for_winner_and_endpoints(tmp_path):
    from merganser.report.studies import show

    tasks = {"quiz": StudyTask(ITEMS, subset=20), "exam": StudyTask(ITEMS, subset=30)}
    mean = Objective("mean", {"quiz": 0.25, "exam": 0.75})
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(tasks=tasks, objectives=(mean,), population=5, generations=2), World())
    page = Tables()
    show(page, study)
    columns, rows = page.tables[0]
    assert columns[:5] == ["model", "mean", "± mean", "quiz", "± quiz"]
    assert [row[0] for row in rows[1:]] == ["math", "code"]
    for row in rows:
        named = dict(zip(columns, row, strict=True))
        value, error, quiz, quiz_error = row[1:5]
        exam, exam_error = named["exam"], named["± exam"]
        assert value == pytest.approx(0.25 * quiz + 0.75 * exam)
        assert error == pytest.approx(((0.25 * quiz_error) ** 2 + (0.75 * exam_error) ** 2) ** 0.5)
    best = max(rows[1:], key=lambda row: row[1])
    said = f"the best endpoint, {best[0]}; item by item the gain is {rows[0][1] - best[1]:+.3f}"
    assert any(said in text for text in page.texts)

    columns, rows = page.tables[2]
    assert columns == ["model", "quiz", "exam"], "negative transfer by task"
    assert all(0 <= value <= 1 for value in rows[0][1:])

    columns, rows = page.tables[-1]
    assert columns == ["trial", "state", "mean, estimated", "weight.math", "weight.code", "seconds"]
    assert [row[3:5] for row in rows] == [list(trial.values.values()) for trial in study.trials()]


def test_a_page_of_two_objectives_with_failures(tmp_path):
    from merganser.report import Page
    from merganser.report.studies import show

    study = Study.open(tmp_path / "s.sqlite")
    study.run(two_objectives(), World(fail_above=1.6))
    page = Page("study")
    show(page, study)
    html = page.render()
    for expected in ("Winners on unseen items", "Convergence", "Pareto front", "times fewer", "answers nonsense"):
        assert expected in html


def test_a_study_without_calibration(tmp_path):
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(tasks={"quiz": StudyTask(ITEMS, subset=20)}, population=5, generations=1), World())
    summary = summarize(study)
    assert summary.cost.calibration == 0
    assert summary.agreement == ()
    assert set(summary.winners[0].negative_transfer) == {"quiz"}


def test_epsilon_is_of_subsets_chosen_as_the_study_chose_its_own(tmp_path):
    from merganser.evolve import subsets
    from merganser.evolve.estimators import compare

    study = Study.open(tmp_path / "s.sqlite")
    task = StudyTask(ITEMS, subset=20, extractor="irt", estimator="mp-irt")
    study.run(design(tasks={"quiz": task}, stability=3, generations=1), World())
    (agreement,) = summarize(study).agreement
    prepared = study.prepared()["quiz"]
    full = np.array([study.store.answers(t)["quiz"].values for t in study.store.trials("full")])
    drawn = [subsets.irt_clustering(prepared.estimator.irt.items, 20, seed=seed) for seed in range(20)]
    assert agreement.epsilon["mp-irt"] == pytest.approx(compare({"x": prepared.estimator}, full, drawn)["x"])
