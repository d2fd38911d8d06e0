"""Bad run files say what is wrong, where, and what would be right, before any work."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest

from merganser.errors import MerganserError
from merganser.evolve import loading
from merganser.evolve.runfile import RunFile
from merganser.evolve.schema import from_document, to_document

pytest.importorskip("pymoo")

#: A search for several objectives.
GENETIC = ("{population: 5", "{algorithm: nsga2, population: 5")
TASK = "quiz: {kind: multiple-choice, data: ./quiz.jsonl, subset: 8, estimator: gmp-irt, c: adaptive}"
SPACE_LINE = "weight: {low: 0, high: 1.5, per: model}"
BAD = [
    # keys and types
    (("method: ties", "methd: ties"), "unknown key 'methd'; did you mean 'method'?"),
    (("method: ties", "method: tie"), "did you mean 'ties'"),
    (("method: ties\n", ""), "'method' is missing"),
    (("objectives: [quiz]\n", ""), "'objectives' is missing"),
    (("objectives: [quiz]", "objectives: quiz"), "objectives: must be a list, got 'quiz'"),
    (("models: {math: ./math, code: ./code}", "models: [./math, ./code]"), "models: must be a mapping, got"),
    (("models: {math: ./math, code: ./code}", "models: {}"), "models: name at least one"),
    (("code: ./code", "code: 3"), "models.code: must be text, got 3"),
    (
        ("search: {population: 5", "search: {popultion: 5"),
        "search: unknown key 'popultion'; did you mean 'population'?",
    ),
    (("population: 5", "population: five"), "search.population: must be a valid integer, got 'five'"),
    (("subset: 8", "subst: 8"), "tasks.quiz: unknown key 'subst'; did you mean 'subset'?"),
    (("kind: causal-lm", "knd: causal-lm"), "model: unknown key 'knd'; did you mean 'kind'?"),
    (("per: model", "per: layer"), "space.weight.per: expected 'model' or 'merge', got 'layer'"),
    (("low: 0, high: 1.5", "integr: true, high: 1.5"), "space.weight: unknown key 'integr'; did you mean 'integer'?"),
    (("subset: 8", "strata: 3"), "tasks.quiz.strata: must be"),
    (("low: 0, high: 1.5", "lo: 0, high: 1.5"), "space.weight: unknown key 'lo'; did you mean 'low'?"),
    (("low: 0, high", "low: a, high"), "run.yml: space.weight.low: must be a valid number, got 'a'"),
    # the space
    ((SPACE_LINE, "weight: {low: 0, per: model}"), "space.weight: needs low and high, or choices"),
    ((SPACE_LINE, "weight: {low: 2, high: 1, per: model}"), "space.weight: a range goes from low to a higher high"),
    ((SPACE_LINE, "weight: {low: 0, high: 1, choices: [1, 2]}"), "space.weight: give either choices, or low and high"),
    ((SPACE_LINE, "weight: {choices: [1]}"), "space.weight: choices are two or more"),
    ((SPACE_LINE, "weight: {low: 0, high: 1, log: true}"), "space.weight: a logarithmic range"),
    (
        (SPACE_LINE, "weight: {low: 0.5, high: 2, integer: true}"),
        "space.weight: a range of whole numbers has whole ends",
    ),
    ((SPACE_LINE, "weight: {low: 0, high: 1, points: 0}"), "space.weight: 0 control points"),
    ((SPACE_LINE, "weight: {choices: [0, 1], points: 2}"), "space.weight: only real numbers can be interpolated"),
    ((SPACE_LINE, "weigth: {low: 0, high: 1}"), "space.weigth: not a parameter of ties; did you mean 'weight'?"),
    ((SPACE_LINE, "normalize: {choices: [true, false], per: model}"), "one value for all models"),
    (("density: {low: 0.2", "density: {low: -0.2"), "out of bounds"),
    (("tasks:", 'constraints: ["weight.maths <= 1"]\ntasks:'), "did you mean 'weight.math'"),
    (("tasks:", 'constraints: ["weight.math = 1"]\ntasks:'), "expected one <= or >="),
    (("method: ties", "method: ties\nparameters: {densty: 1}"), "densty"),
    # models
    (("code: ./code", "code: ./absent"), "absent"),
    (("base: ./base\n", ""), "base"),
    (("kind: causal-lm", "kind: causal"), "did you mean 'causal-lm'"),
    (
        ("kind: causal-lm", "kind: 'no_such.module:build'"),
        "model.kind: no_such.module:build: no module 'no_such.module'",
    ),
    # tasks
    (("kind: multiple-choice", "kind: multiplechoice"), "tasks.quiz: unknown kind 'multiplechoice'; did you mean"),
    (("data: ./quiz.jsonl, ", ""), "tasks.quiz: kind multiple-choice needs data"),
    (("./quiz.jsonl", "./quizz.jsonl"), "cannot be read"),
    (("./quiz.jsonl", "./sums.jsonl"), "line 1: no 'options'"),
    (("kind: multiple-choice", "kind: function"), "needs function: package.module:name and items"),
    (("c: adaptive", "options: {promt: x}"), "options: unknown 'promt'; did you mean 'prompt'?"),
    (("kind: multiple-choice", "kind: lm-eval"), "kind lm-eval needs task: the name of a task of the harness"),
    (
        ("kind: multiple-choice,", "kind: lm-eval, task: quiz, options: {metrc: acc},"),
        "options: unknown 'metrc'; did you mean 'metric'?",
    ),
    (("estimator: gmp-irt", "estimator: gmpirt"), "unknown estimator 'gmpirt'; did you mean 'gmp-irt'?"),
    (("c: adaptive", "extractor: randm"), "unknown extractor 'randm'; did you mean 'random'?"),
    (("subset: 8", "subset: 80"), "a subset of 80 is more than the 48 items left after 12"),
    (("c: adaptive", "test: 1.5"), "test is the share of items held out"),
    (("c: adaptive", "c: 2.0"), "c lies in [0, 1]"),
    (("c: adaptive", "c: best"), "c is a number in [0, 1], 'adaptive' or 'bias-variance'"),
    (("c: adaptive", "strata: topic"), "strata need the stratified extractor"),
    (("c: adaptive", "extractor: stratified, strata: tpic"), "record 0 has no field 'tpic'"),
    (("c: adaptive", "calibration: ./absent.npy"), "no such file"),
    (("c: adaptive", "calibration: ./quiz.jsonl"), "not a sample that the lm-evaluation-harness wrote"),
    # objectives and search
    (("objectives: [quiz]", "objectives: [quizz]"), "did you mean 'quiz'"),
    (("objectives: [quiz]", "objectives: []"), "a study needs a task and an objective"),
    (("objectives: [quiz]", "objectives: [{name: x, measures: {}}]"), "measures: name at least one"),
    (
        ("objectives: [quiz]", "objectives: [quiz, {name: two, measures: {quiz: 2.0}}]"),
        "GA supports one objective, and there are 2",
    ),
    (("{population: 5", "{algorithm: gaa, population: 5"), "unknown algorithm 'gaa'; did you mean 'ga'?"),
    (("{population: 5", "{algorithm: nsga2, population: 5"), "NSGA-II needs several objectives"),
    (("population: 5", "population: 1"), "a population of 1 is too small"),
    (("generations: 2", "generations: 0"), "0 generations"),
    (("model: {kind: causal-lm}", "workers: 0"), "workers: 0; at least 1"),
    # directions
    (
        ("objectives: [quiz]", "objectives: [{name: q, measures: {quiz: 1.0}, maximize: false}]"),
        "objective 'q': maximize: false would look for the worst 'quiz', whose higher values are better; leave it out",
    ),
    (
        (TASK, f"p: {{kind: perplexity, data: ./texts.tsv, estimator: p-irt}}\n  {TASK}"),
        "tasks.p: IRT is for answers that are right or wrong",
    ),
    (("kind: multiple-choice, data", "data"), "tasks.quiz: 'kind' is missing"),
    # first merges
    (
        ("objectives:", "starts: [{weight.math: 9, weight.code: 1}]\nobjectives:"),
        "starts[0]: values for density",
    ),
    # YAML itself
    (("method: ties", "method: ties\nmethod: linear"), "'method' is given twice"),
    (("objectives: [quiz]", "objectives: [quiz"), "not valid YAML"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[f"{i}: {m[:40]}" for i, (_, m) in enumerate(BAD)])
def test_bad_run_files(run_file, change, message):
    path = run_file(change)
    with pytest.raises(MerganserError) as caught:
        loading.load(path)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
    assert "run.yml" in str(caught.value)


def test_several_problems_are_said_at_once(run_file):
    path = run_file(("subset: 8", "subset: 80"), ("kind: causal-lm}", "kind: causal}"))
    with pytest.raises(MerganserError, match="2 problems"):
        loading.load(path)


@pytest.mark.parametrize(
    "change",
    [("method: ties", "methd: ties"), ("objectives: [quiz]", "objectivs: [quiz]"), ("{kind: multi", "{knd: multi")],
)
def test_a_misspelt_required_key_is_told_once(run_file, change):
    """It is unknown, not missing as well; a key that is missing beside it still is."""
    with pytest.raises(MerganserError, match="unknown key .*; did you mean") as caught:
        loading.load(run_file(change))
    assert "missing" not in str(caught.value)
    with pytest.raises(MerganserError, match="'tasks' is missing"):
        loading.load(run_file(change, ("tasks:", "x-chores:")))


def test_no_file_and_no_mapping(tmp_path):
    with pytest.raises(MerganserError, match="no such run file"):
        loading.load(tmp_path / "absent.yml")
    with pytest.raises(MerganserError, match="expected one mapping"):
        loading.parse("- a list")


def test_a_good_run_file(run_file, llamas, tmp_path):
    np.save(tmp_path / "answers.npy", np.random.default_rng(0).integers(0, 2, (5, 60)).astype(float))
    extra = f"c: 0.3, extractor: stratified, strata: topic, calibration: {tmp_path}/answers.npy, options: {{batch: 4}}"
    path = run_file(
        ("c: adaptive", extra),
        ("per: model}", "per: model, points: 2}"),
        ("tasks:", 'constraints: ["weight.math[0] + weight.code[1] <= 2"]\ntasks:'),
        ("objectives: [quiz]", "objectives: [{name: score, measures: {quiz: 1.0}}]"),
    )
    run = loading.load(path)
    assert [v.name for v in run.design.search_space.variables][:2] == ["weight.math[0]", "weight.math[1]"]
    assert run.design.endpoints == ("math", "code")
    assert run.design.tasks["quiz"].items == 60
    assert run.design.tasks["quiz"].strata[:5] == ("0", "1", "2", "3", "0")
    assert run.calibration["quiz"].answers.shape == (5, 60)
    assert run.evaluate.examiners["quiz"].batch == 4
    assert run.evaluate.template["base"] == str(llamas / "base")
    assert pickle.loads(pickle.dumps(run.evaluate)).template == run.evaluate.template


def test_functions_of_the_current_directory(run_file, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_quiz_for_runs.py").write_text("def ask(model, items):\n    return [1.0 for _ in items]\n")
    path = run_file(
        ("kind: multiple-choice, data: ./quiz.jsonl", "kind: function, function: 'own_quiz_for_runs:ask', items: 60")
    )
    assert loading.load(path).evaluate.examiners["quiz"](None, [3, 4]) == {"score": [1.0, 1.0]}


@pytest.mark.parametrize("form", ["answers", "tinyBenchmarks"])
def test_a_calibration_brings_its_extractor_and_estimator(run_file, tmp_path, form):
    rng = np.random.default_rng(0)
    reference = f"{tmp_path}/known.npz#lb/quiz" if form == "tinyBenchmarks" else f"{tmp_path}/known.npy"
    if form == "answers":
        np.save(tmp_path / "known.npy", rng.integers(0, 2, (5, 60)))
    else:
        parameters = {"lb/A": rng.normal(size=(1, 2, 70)), "lb/B": rng.normal(size=(1, 1, 70))}
        np.savez(tmp_path / "known.npz", **parameters, **{"lb/scenarios/quiz": np.arange(10, 70)})
    told, untold = ("estimator: gmp-irt, c: adaptive", f"calibration: '{reference}'"), ("subset: 8, ", "")
    task = loading.load(run_file(told)).design.tasks["quiz"]
    assert (task.extractor, task.estimator, task.c) == ("irt", "gmp-irt", "adaptive")
    task = loading.load(run_file((told[0], f"{told[1]}, estimator: naive, c: 0.1"))).design.tasks["quiz"]
    assert (task.extractor, task.estimator, task.c) == ("irt", "naive", 0.1)
    task = loading.load(run_file(told, untold)).design.tasks["quiz"]
    assert (task.extractor, task.estimator, task.c) == ("random", "naive", 0.5)


def test_a_calibration_of_other_items_is_refused_before_any_work(run_file, tmp_path):
    np.save(tmp_path / "known.npy", np.zeros((5, 61)))
    path = run_file(("c: adaptive", f"calibration: {tmp_path}/known.npy"))
    with pytest.raises(MerganserError, match=r"tasks.quiz.calibration.*covers 61 items, but the task has 60"):
        loading.load(path)


TOY_BAD = [
    (("generations: 2}", "generations: 2, seed: -1}"), "seed: -1; a whole number from 0"),
    (("generations: 2}", "generations: 2, seed: 99999999999}"), "seed: 99999999999"),
    (("generations: 2}", "generations: 2, stability: -1}"), "stability: -1"),
    (("generations: 2}", "generations: 2, reference_points: [[1.0], [1.0, 2.0]]}"), "reference points have one finite"),
    (("items: 60, subset: 12}\n  right", "items: -3, subset: 12}\n  right"), "tasks.left: items: -3"),
    (("subset: 12}\nobj", "subset: 12, dimensions: 99}\nobj"), "between 1 and 15 dimensions"),
    (("subset: 12}\nobj", "subset: 12, extractor: representation}\nobj"), "no texts to embed; choose another"),
    (("  left: {kind", "  left.a: {kind"), "a task's name must not contain a dot"),
    (("subset: 12}\nobj", "subset: 12, calibration: ./text.npy}\nobj"), "text.npy: expected an array of numbers"),
    (("subset: 12}\nobj", "subset: 12, calibration: ./deep.npy}\nobj"), "not an array of shape (2, 2, 60)"),
    (("subset: 12}\nobj", "subset: 12, calibration: ./large.npy}\nobj"), "answers lie in [0, 1]; found 7 to 7"),
    (("./right.safetensors", "./nested.yml"), "a nested recipe cannot be evolved"),
    # variables that decide nothing
    (("per: model}", 'per: model, groups: {a: "nothing*", b: "*"}}'), "no tensor depends on weight.left.a"),
    (("per: model}", 'per: model, groups: {a: "*", b: "bias"}}'), "no tensor depends on weight.left.b, weight.right.b"),
    (("per: model}", 'per: model, groups: {a: "*", b: "*"}}'), "two groups have the same glob"),
    (("models: {", "models: {same: ./base.safetensors, "), "weight.same: same is the base itself"),
    (("per: model}", "per: model, points: 9}"), "none is at that depth"),
    (("objectives:", 'overrides: [{match: "*", weight: 1}]\nobjectives:'), "overrides set it"),
    (
        ("objectives:", 'constraints: ["weight.left + weight.right >= 4"]\nobjectives:'),
        "no values of the space satisfy it",
    ),
    (
        ("objectives:", 'constraints: ["weight.left - weight.right <= -1.6"]\nobjectives:'),
        "no values of the space satisfy it",
    ),
]


@pytest.mark.parametrize(("change", "message"), TOY_BAD, ids=[m for _, m in TOY_BAD])
def test_what_the_run_file_alone_shows_is_said_before_any_work(toy, tmp_path, change, message):
    (tmp_path / "nested.yml").write_text("method: linear\nmodels: [left.safetensors, right.safetensors]")
    np.save(tmp_path / "text.npy", np.array([["yes"] * 60]))
    np.save(tmp_path / "deep.npy", np.zeros((2, 2, 60)))
    np.save(tmp_path / "large.npy", np.full((2, 60), 7.0))
    with pytest.raises(MerganserError) as caught:
        loading.load(toy(change))
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_measures_that_nobody_reports(run_file):
    path = run_file(("objectives: [quiz]", "objectives: [quiz.lenght]"))
    with pytest.raises(MerganserError, match=r"objectives\[0\]: nothing measures 'quiz\.lenght'"):
        loading.load(path)
    tasks = "sums: {kind: generation, data: ./sums.jsonl, subset: 4}\nobjectives: [sums.lenght]"
    with pytest.raises(MerganserError, match=r"did you mean 'sums\.length'\?"):
        loading.load(run_file(("objectives: [quiz]", f"  {tasks}")))


def test_constraints_at_the_edge_of_the_space(toy):
    assert loading.load(toy(("objectives:", 'constraints: ["weight.left + weight.right >= 3"]\nobjectives:')))


def test_merges_of_the_user_come_first(toy):
    own = "starts: [{weight.left: 0.3, weight.right: 0.4}]\nobjectives:"
    starts = loading.load(toy(("objectives:", own))).design.starts
    assert starts[0] == {"weight.left": 0.3, "weight.right": 0.4}
    assert {"weight.left": 1.0, "weight.right": 0.0} in starts
    wrong = "starts: [{weight.left: 0.3, weight.rigth: 0.4}]\nobjectives:"
    with pytest.raises(MerganserError, match=r"no variable 'weight\.rigth'; did you mean 'weight\.right'\?"):
        loading.load(toy(("objectives:", wrong)))


def test_a_function_whose_lower_answers_are_better(toy):
    falling = ("subset: 12}\nobj", "subset: 12, direction: lower}\nobj")
    single = ("[{name: mean, measures: {left: 0.5, right: 0.5}}]", "[right]")
    assert loading.load(toy(single)).design.objectives[0].maximize
    assert loading.load(toy(falling, single)).design.objectives[0].maximize is False


def test_a_direction_counts_beside_tasks_that_know_their_own(run_file):
    errors = "e: {kind: function, function: 'toy_experts:left', items: 60, direction: lower}"
    path = run_file((TASK, f"{errors}\n  {TASK}"), ("objectives: [quiz]", "objectives: [e, quiz]"), GENETIC)
    assert [objective.maximize for objective in loading.load(path).design.objectives] == [False, True]


def test_a_start_that_violates_the_constraints_is_refused(toy):
    own = "starts: [{weight.left: 0.3, weight.right: 0.4}]\nobjectives:"
    limits = 'constraints: ["weight.left + weight.right <= 0.5"]'
    with pytest.raises(MerganserError, match=r"starts\[0\]: violates the constraints"):
        loading.load(toy(("objectives:", f"{limits}\n{own}")))


def test_a_completed_run_file_survives_the_store(run_file):
    run = loading.load(run_file()).design
    assert from_document(RunFile, json.loads(json.dumps(to_document(run)))) == run
    assert not run.difference(replace(run, workers=3, answers="elsewhere.sqlite"))
    assert run.difference(replace(run, models=dict(reversed(run.models.items())))) == "the order of models"


def test_variables_of_one_of_several_methods_count(toy):
    text = ("space: {", "space: {method: {choices: [task_arithmetic, ties]}, density: {low: 0.1, high: 1}, ")
    assert len(loading.load(toy(text)).design.search_space.variables) == 4


def test_what_is_no_text_and_what_is_a_directory(tmp_path, toy):
    toy()
    with pytest.raises(MerganserError, match="not a text in UTF-8; a run file is YAML"):
        loading.load(tmp_path / "base.safetensors")
    with pytest.raises(MerganserError, match="is a directory, not a run file"):
        loading.load(tmp_path)


PERPLEXITY = (TASK, f"p: {{kind: perplexity, data: ./texts.tsv}}\n  {TASK}")


@pytest.mark.parametrize(
    ("objective", "maximize"),
    [
        ("p", False),
        ("{name: x, measures: {p: 1.0}}", False),
        ("{name: x, measures: {p: 1.0}, maximize: false}", False),
        ("{name: x, measures: {p: -1.0}}", True),
        ("{name: x, measures: {quiz: 1.0, p: -0.1}}", True),
        ("{name: x, measures: {quiz: -1.0, p: 0.1}}", False),
        ("quiz", True),
    ],
)
def test_measures_know_their_direction(run_file, objective, maximize):
    found = loading.load(run_file(PERPLEXITY, ("objectives: [quiz]", f"objectives: [{objective}]")))
    assert found.design.objectives[0].maximize is maximize


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("{name: x, measures: {quiz: 1.0, p: 1.0}}", "a better 'quiz' raises it and a better 'p' lowers it"),
        (
            "{name: x, measures: {p: 1.0}, maximize: true}",
            "would look for the worst 'p', whose lower values are better",
        ),
        ("{name: x, measures: {p: -1.0}, maximize: false}", "would look for the worst 'p'"),
    ],
)
def test_objectives_that_reward_worse_models_are_refused(run_file, objective, message):
    with pytest.raises(MerganserError, match=message):
        loading.load(run_file(PERPLEXITY, ("objectives: [quiz]", f"objectives: [{objective}]")))


def test_exact_match_and_choice_are_kinds_of_a_run_file(run_file):
    change = (TASK, "quiz: {kind: exact-match, data: ./sums.jsonl, options: {fields: {question: question}}}")
    assert len(loading.load(run_file(change)).evaluate.examiners["quiz"]) == 30
