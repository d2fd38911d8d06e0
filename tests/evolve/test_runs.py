"""A study goes on as the one it was started as, or not at all; what is refused leaves its file as it was."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file
from synthetic_designs import design
from synthetic_world import World

from merganser.errors import InputError, MerganserError
from merganser.evolve.runs import recipe, start
from merganser.evolve.store import Trial
from merganser.evolve.study import Study

pytest.importorskip("pymoo")


@pytest.fixture
def interrupted(toy, tmp_path):
    """The toy's run file and a study of it that was stopped after three trials."""

    def stop(event):
        if event.phase == "search" and event.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(toy(), tmp_path / "s.sqlite", on_event=stop)
    return toy, tmp_path / "s.sqlite"


@pytest.mark.parametrize(
    "change",
    [
        ("left: ./left.safetensors", "left: ./right.safetensors"),
        ('"toy_experts:right"', '"toy_experts:left"'),
        ("model: {kind: ", "parameters: {normalize: true}\nmodel: {kind: "),
        ("model: {kind: ", "output: {dtype: float64}\nmodel: {kind: "),
        ("method: task_arithmetic", "method: linear"),
        (
            "left: ./left.safetensors, right: ./right.safetensors",
            "right: ./right.safetensors, left: ./left.safetensors",
        ),
    ],
)
def test_a_changed_run_file_is_another_study(interrupted, change):
    toy, file = interrupted
    with pytest.raises(InputError, match="differs from the run file"):
        start(toy(change), file, resume=True)
    study = start(toy(), file, resume=True)
    assert study.ended
    assert len(study.trials()) == 12


def test_workers_and_devices_may_change(interrupted):
    toy, file = interrupted
    study = start(
        toy(('"toy_experts:build"', '"toy_experts:build", device: "cpu:0"'), name="moved.yml"), file, resume=True
    )
    assert study.ended


def test_changed_weights_are_another_study(interrupted, tmp_path):
    toy, file = interrupted
    place = tmp_path / "left.safetensors"
    kept = load_file(place)
    save_file({**kept, "weight": kept["weight"] + 1}, place)
    with pytest.raises(InputError, match=r"left\.safetensors has changed since .*s\.sqlite was started"):
        start(toy(), file, resume=True)
    save_file(kept, place)
    study = start(toy(), file, resume=True)
    paths = [model["path"] for model in recipe(study, study.best())["models"]]
    assert paths == [str(tmp_path / "left.safetensors"), str(tmp_path / "right.safetensors")]


@pytest.mark.parametrize("resume", [False, True])
def test_a_study_from_python_is_not_overwritten(toy, tmp_path, resume):
    study = Study.open(tmp_path / "s.sqlite")
    study.run(design(population=5, generations=1), World())
    before = study.best()
    with pytest.raises(InputError, match="started from Python"):
        start(toy(), tmp_path / "s.sqlite", resume=resume)
    assert study.design == design(population=5, generations=1)
    assert study.best() == before


def test_resume_needs_a_study(toy, tmp_path):
    with pytest.raises(InputError, match="no such study to resume"):
        start(toy(), tmp_path / "typo.sqlite", resume=True)
    assert not (tmp_path / "typo.sqlite").exists()


@pytest.mark.parametrize("settings", [{"workers": 0}, {"workers": 2, "evaluate": lambda candidate, items: {}}])
def test_what_cannot_be_run_leaves_the_file_free(tmp_path, settings):
    study = Study.open(tmp_path / "s.sqlite")
    small = design(population=5, generations=1)
    with pytest.raises(InputError, match=r"at least 1|cannot be sent to other processes"):
        study.run(small, **{"evaluate": World(), **settings})
    assert study.run(small, World()) is not None


def test_an_endpoint_that_fails_is_said_in_the_result(toy, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from merganser.cli.evolve import app
    from merganser.evolve.fitness import LiveMerge
    from merganser.evolve.summary import summarize
    from merganser.report.directories import report

    load = LiveMerge.load

    def failing(self, candidate, *settings):
        if candidate == "right":
            raise InputError("no such weights")
        return load(self, candidate, *settings)

    monkeypatch.setattr(LiveMerge, "load", failing)
    study = start(toy(), tmp_path / "s.sqlite")
    assert study.test_error("left") is None
    assert study.test_error(study.best()) is None
    assert summarize(study).untested == {"right": "no such weights"}
    shown = CliRunner().invoke(app, ["best", str(tmp_path / "s.sqlite")]).stdout
    assert "right alone, on unseen items: failed: no such weights" in shown
    page, _ = report(tmp_path / "s.sqlite")
    assert "right could not be asked the test items" in page.render()


def test_an_endpoint_that_fails_in_calibration_gives_one_line(toy, tmp_path):
    path = toy(('"toy_experts:right", items: 60, subset: 12', '"toy_experts:broken", items: 60, estimator: gmp-irt'))
    with pytest.raises(MerganserError) as caught:
        start(path, tmp_path / "s.sqlite")
    assert str(caught.value) == "endpoint 'left' could not be evaluated: RuntimeError: the questions are gone"


def test_failures_are_shown_by_every_command(toy, tmp_path):
    from typer.testing import CliRunner

    from merganser.cli.evolve import app
    from merganser.report.directories import report

    path, file = toy(('"toy_experts:right"', '"toy_experts:broken"')), tmp_path / "toy.sqlite"
    failed = CliRunner().invoke(app, ["run", str(path)])
    assert "search    1/12  failed: RuntimeError: the questions are gone" in failed.stderr
    assert "RuntimeError: the questions are gone" in str(failed.exception)
    watched = CliRunner().invoke(app, ["watch", str(file)])  # comes back
    assert "6/12 trials, 6 failed" in watched.stdout
    assert "the questions are gone" in watched.stdout
    page, [found] = report(file)
    assert not found["ended"]
    assert "failed for the same reason: RuntimeError: the questions are gone" in page.render()


def test_progress_names_models_and_shows_objectives(toy, tmp_path):
    from typer.testing import CliRunner

    from merganser.cli.evolve import _Listener, app

    done = CliRunner().invoke(app, ["run", str(toy()), "--study", str(tmp_path / "s.sqlite")])
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    assert any(line.startswith("test      2/4  left: mean 0.") for line in lines)
    assert any(line.startswith("rerank    1/3  mean 0.") for line in lines)
    stopped = Trial("candidate", "x", "done", values={}, objectives={"mean": 0.25}, stopped=1)
    assert _Listener(None, False, ())._describe(stopped) == "mean 0.2500, stopped"
    assert not any(line.startswith("done") for line in lines)
    assert "winner.yml writes the recipe" in done.stdout


def test_a_function_that_answers_by_item_is_told_what_is_expected(toy, tmp_path):
    path = toy(('"toy_experts:right"', '"toy_experts:by_item"'))
    with pytest.raises(MerganserError, match="toy_experts:by_item: expected a list of answers"):
        start(path, tmp_path / "s.sqlite")


def test_a_study_with_another_direction_is_not_gone_on_with(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = start(toy(), "toy.sqlite")
    document = study.store.get("design")
    document["objectives"][0]["maximize"] = False
    study.store.set(design=document)
    study.close()
    with pytest.raises(InputError, match="differs from the run file"):
        start(toy(), "toy.sqlite", resume=True)


def test_the_first_population_holds_what_everyone_would_try(toy, tmp_path):
    with start(
        toy(("population: 6", "population: 10"), ("generations: 2", "generations: 1")), tmp_path / "t.sqlite"
    ) as study:
        tried = [(t.values["weight.left"], t.values["weight.right"]) for t in study.trials()]
        assert tried[:5] == [(1, 0), (0, 1), (0.5, 0.5), (1, 1), (0, 0)]
        answers = {t.label: study.store.answers(t)["left"].values.tolist() for t in study.trials()}
        assert len(answers) == 10
        assert study.test_scores("base") is not None, "the base is compared with"
        base = study.test_scores("base")
        assert base != study.test_scores("left")


def test_starts_outside_the_space_are_left_out(toy):
    from merganser.evolve import loading

    loaded = loading.load(toy(("low: 0, high: 1.5", "low: 0.2, high: 0.8")))
    assert loaded.design.starts == ({"weight.left": 0.5, "weight.right": 0.5},)
    limited = loading.load(toy(("tasks:", 'constraints: ["weight.left + weight.right <= 1"]\ntasks:')))
    assert {"weight.left": 1.0, "weight.right": 1.0} not in limited.design.starts


def test_a_base_that_is_a_model_is_compared_once(toy):
    from merganser.evolve import loading

    change = ("models: {left: ./left.safetensors", "models: {base: ./left.safetensors")
    assert loading.load(toy(change, ("per: model", "per: merge"))).design.references == ()
