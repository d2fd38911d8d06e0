"""The user's story on tiny Llamas: run, watch, best, export, merge, report."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import merganser as mg
from merganser.cli.evolve import app
from merganser.errors import InputError
from merganser.evolve.runs import recipe
from merganser.evolve.study import Study

pytest.importorskip("pymoo")


def call(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def finished(run_file):
    path = run_file()
    call("run", path)
    return path.with_suffix(".sqlite")


def test_the_whole_story(finished, run_file, tmp_path):
    shown = call("best", finished)
    assert "on unseen items: quiz" in shown
    found = json.loads(call("best", finished, "--json"))["winners"][0]
    status = json.loads(call("watch", finished, "--once", "--json"))
    assert (status["done"], status["total"], status["ended"]) == (10, 10, True)
    assert "math alone, on unseen items: quiz" in shown
    assert "so far" not in shown
    assert status["best"]["quiz"] == found["objectives"]["quiz"]

    call("export", finished, tmp_path / "winner.yml")
    mg.run(tmp_path / "winner.yml", tmp_path / "merged")
    study = Study.open(finished)
    from merganser.evolve import loading

    live = loading.load(run_file()).evaluate.live
    weights = live.load(study.best().values).state_dict()
    merged = mg.open(tmp_path / "merged").state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in merged.items())

    with pytest.raises(InputError, match="no directory"):
        call("export", finished, tmp_path / "none" / "winner.yml")


def test_the_exported_recipe_scores_what_the_study_says(finished, run_file, llamas, tmp_path):
    """The merged checkpoint, loaded by transformers, gives the very answers that the trial recorded."""
    from merganser.evaluate.loaders import Loader
    from merganser.evolve import loading

    call("export", finished, tmp_path / "winner.yml")
    mg.run(tmp_path / "winner.yml", tmp_path / "merged")
    study = Study.open(finished)
    winner = study.best()
    tested = study.store.trials("test", winner.label)[-1]
    answers = study.store.answers(tested)["quiz"]
    model = Loader("causal-lm", str(tmp_path / "merged"))().eval()
    examiner = loading.load(run_file()).evaluate.examiners["quiz"]
    with torch.inference_mode():
        assert examiner(model, answers.items.tolist())["score"] == answers.values.tolist()


def test_running_again_needs_resume_and_the_same_file(finished, run_file):
    path = run_file()
    with pytest.raises(InputError, match="already contains a study"):
        call("run", path)
    before = call("best", finished, "--json")
    assert call("run", path, "--resume", "--json").splitlines()[-1] == before.strip()
    changed = run_file(("high: 1.5", "high: 1.4"))
    with pytest.raises(InputError, match="differs from the run file"):
        call("run", changed, "--resume")


def test_dry_run_and_json_events(run_file):
    path = run_file(("estimator: gmp-irt, c: adaptive", "extractor: random"), ("generations: 2", "generations: 1"))
    assert "48 items for fitness and calibration, 12 for the test" in call("run", path, "--dry-run")
    assert json.loads(call("run", path, "--dry-run", "--json"))["trials"] == 5
    events = [json.loads(line) for line in call("run", path, "--json").splitlines()]
    assert [e["event"] for e in events].count("search") == 6
    assert events[-1]["event"] == "best"


def test_representation_clustering_and_two_objectives(run_file, tmp_path):
    path = run_file(
        (
            "estimator: gmp-irt, c: adaptive}",
            "extractor: representation}\n  sums: {kind: generation, data: ./sums.jsonl, "
            "subset: 4, options: {max_new_tokens: 4}}",
        ),
        ("objectives: [quiz]", "objectives: [quiz, {name: short, measures: {sums.length: 1.0}, maximize: false}]"),
        ("{population: 5, generations: 2", "{algorithm: nsga2, population: 6, generations: 1"),
    )
    call("run", path)
    study = Study.open(path.with_suffix(".sqlite"))
    assert study.prepared()["quiz"].subset.weights.std() > 0
    assert all("sums.length" in t.estimates for t in study.trials() if t.valid)
    with pytest.raises(InputError, match="several objectives"):
        call("export", path.with_suffix(".sqlite"), tmp_path / "winner.yml")
    call("export", path.with_suffix(".sqlite"), tmp_path / "winner.yml", "--objective", "short")
    place = study.trials()[1]
    call(
        "export", path.with_suffix(".sqlite"), tmp_path / "other.yml", "--trial", f"{place.generation}:{place.position}"
    )
    with pytest.raises(InputError, match="no such trial"):
        call("export", path.with_suffix(".sqlite"), tmp_path / "x.yml", "--trial", "9:9")
    with pytest.raises(InputError, match="exists already"):
        call("export", path.with_suffix(".sqlite"), tmp_path / "other.yml", "--objective", "quiz")
    again = call(
        "export", path.with_suffix(".sqlite"), tmp_path / "other.yml", "--objective", "quiz", "--overwrite", "--json"
    )
    assert json.loads(again) == {"event": "done", "path": str(tmp_path / "other.yml")}
    with pytest.raises(InputError, match="is the study itself"):
        call("export", path.with_suffix(".sqlite"), path.with_suffix(".sqlite"), "--objective", "quiz", "--overwrite")


def test_a_directory_is_no_run_file():
    with pytest.raises(InputError, match="is a directory, not a run file"):
        call("run", ".")


def test_a_study_without_a_run_file_has_no_recipe(tmp_path):
    from synthetic_designs import design
    from synthetic_world import World

    study = Study.open(tmp_path / "s.sqlite")
    winner = study.run(design(population=5, generations=1), World())
    with pytest.raises(InputError, match="not started from a run file"):
        recipe(study, winner)


def test_an_interrupted_study_says_so(run_file):
    from merganser.evolve.runs import start

    path = run_file()
    file = path.with_suffix(".sqlite")

    def stop(event):
        if event.phase == "search" and event.done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(path, file, on_event=stop)
    assert "so far, after 6 of 10 trials" in call("best", file)
    assert not json.loads(call("watch", file, "--once", "--json"))["ended"]
    events = []
    study = start(path, file, resume=True, on_event=events.append)
    assert [e.done for e in events if e.phase == "search"] == [6, 7, 8, 9, 10]
    assert study.ended
    assert "ended" in call("watch", file)


def test_init_writes_a_run_file_that_runs(llamas, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from merganser.cli.evolve import app
    from merganser.evolve import loading

    monkeypatch.chdir(llamas)
    out = tmp_path / "run.yml"
    models, options = ["math=math", "code"], ["--base", "base"]
    tasks = ["--task", "multiple-choice:quiz.jsonl", "--task", "words=exact-match:sums.jsonl"]
    done = CliRunner().invoke(app, ["init", *models, str(out), *options, *tasks, "--method", "ties"])
    assert done.exit_code == 0, done.output
    loaded = loading.load(out)
    assert loaded.design.endpoints == ("math", "code")
    assert [v.name for v in loaded.design.search_space.variables] == ["weight.math", "weight.code", "density"]
    assert loaded.design.objectives[0].measures == {"quiz": 0.5, "words": 0.5}
    assert loaded.design.search.race == 5
    again = CliRunner().invoke(app, ["init", *models, str(out), *options, *tasks])
    assert "exists" in str(again.exception)
    alone = CliRunner().invoke(app, ["init", *models, str(tmp_path / "alone.yml"), *tasks[:2]])
    assert alone.exit_code == 0, alone.output
    assert "one merge answered two questions" in call("run", tmp_path / "alone.yml", "--dry-run"), "without a base"
    for wrong, message in (
        (["math", "@", *options], "needs tasks"),
        (["=x", "@", *tasks], "expected LABEL=CKPT"),
        (["math", "code", *tasks], "code: give the run file to write last"),
        (["math", "@", *options, "--task", "exact-match:none.jsonl"], "none.jsonl"),
        ([*models, "@", *options, *tasks, "--method", "regmean"], "needs the gram statistics"),
        ([*models, "@", *options, *tasks, "--method", "slerp"], "expected a base and one model"),
    ):
        words = [str(tmp_path / "other.yml") if word == "@" else word for word in wrong]
        failed = CliRunner().invoke(app, ["init", *words])
        assert message in str(failed.exception)
        assert not (tmp_path / "other.yml").exists()
