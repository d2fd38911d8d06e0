"""Sweeps over recipes: what is varied, what is scored, what is remembered."""

from __future__ import annotations

import json
import math
import os
import sys

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import merganser as mg
from merganser.cli import build
from merganser.errors import InputError, MerganserError
from merganser.tuning.sweep import parse_over, sweep, variants
from support.llamas import llamas, transformers

__all__ = ["llamas", "transformers"]


@pytest.fixture
def recipe(checkpoint):
    torch.manual_seed(0)
    base = {"w": torch.randn(6, 5), "b": torch.randn(6)}
    paths = [checkpoint("base", base)]
    for name in ("a", "b"):
        paths.append(checkpoint(name, {k: v + torch.randn_like(v) for k, v in base.items()}))
    path = paths[0].parent / "recipe.yml"
    document = {"method": "task_arithmetic", "base": "base", "models": ["a", "b"], "parameters": {"scale": 1.0}}
    path.write_text(yaml.safe_dump(document))
    return path


def closeness(target):
    return lambda variant, budget: -float((variant.weights()["w"] - target).norm())


def test_parse():
    found = parse_over(["density=0.1,0.2", "method=ties, dare_ties", "normalize=true,false", "epsilon=1e-5"])
    assert found == {
        "density": [0.1, 0.2], "method": ["ties", "dare_ties"], "normalize": [True, False], "epsilon": [1e-5],
    }  # fmt: skip
    for bad in ("density", "=1", "density="):
        with pytest.raises(InputError, match="expected parameter"):
            parse_over([bad])


def test_the_grid_finds_what_a_merge_with_these_values_gives(recipe):
    folder = recipe.parent
    models = [folder / "a", folder / "b"]
    target = mg.merge(models, method="task_arithmetic", base=folder / "base", scale=0.7)["w"]
    found = sweep(recipe, {"scale": [0.1, 0.4, 0.7, 1.0]}, closeness(target))
    assert found.trials[0].values == {"scale": 0.7}
    assert found.trials[0].score == pytest.approx(0, abs=1e-5)
    assert [t.score for t in found.trials] == sorted((t.score for t in found.trials), reverse=True)
    assert found.recipe["parameters"]["scale"] == 0.7
    assert json.loads(json.dumps(found.to_dict()))["trials"][0]["values"] == {"scale": 0.7}


def test_methods_take_only_their_own_parameters(recipe):
    found = variants(recipe, {"method": ["linear", "ties"], "density": [0.2, 0.5], "seed": [0]})
    assert [v.values for v in found] == [
        {"method": "linear", "seed": 0},
        {"method": "ties", "density": 0.2, "seed": 0},
        {"method": "ties", "density": 0.5, "seed": 0},
    ]
    assert len({v.fingerprint() for v in found}) == 3


def test_recipes_of_mergekit_are_varied_in_their_own_words(recipe):
    models = [{"model": name, "parameters": {"weight": 1.0}} for name in ("a", "b")]
    recipe.write_text(yaml.safe_dump({"merge_method": "ties", "base_model": "base", "models": models}))
    found = variants(recipe, {"lambda": [0.5, 1.0], "method": ["ties", "task_arithmetic"]})
    assert {v.document["merge_method"] for v in found} == {"ties", "task_arithmetic"}
    assert len({v.fingerprint() for v in found}) == 4
    with pytest.raises(InputError, match="no method of this sweep has a parameter 'scale'"):
        variants(recipe, {"scale": [0.5, 1.0]})  # mergekit ignores it, so the variants would be one


def test_halving_spends_less_on_the_worse(recipe):
    asked = []

    def score(variant, budget):
        asked.append((variant.values["scale"], budget))
        return -abs(variant.values["scale"] - 0.3)

    found = sweep(recipe, {"scale": [0.1, 0.2, 0.3, 0.9]}, score, budgets=(10, 50, 200))
    assert [a for a in asked if a[1] == 50] == [(0.3, 50), (0.2, 50)]
    assert [a for a in asked if a[1] == 200] == [(0.3, 200)]
    assert [t.budget for t in found.trials] == [200, 50, 10, 10]
    assert found.search.best == "scale=0.3"


def test_an_interrupted_sweep_goes_on(recipe, tmp_path):
    journal = tmp_path / "scores.jsonl"
    calls = []

    def score(variant, budget):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(variant.label)
        return math.nan if variant.values["scale"] == 0.1 else variant.values["scale"]

    over = {"scale": [0.1, 0.2, 0.3]}
    with pytest.raises(KeyboardInterrupt):
        sweep(recipe, over, score, journal=journal, scored_by="x")
    with journal.open("a") as file:
        file.write('{"label": "cut o')
    done = list(calls)
    calls.clear()
    found = sweep(recipe, over, lambda v, b: calls.append(v.label) or v.values["scale"], journal=journal, scored_by="x")
    assert (done, calls) == (["scale=0.1", "scale=0.2"], ["scale=0.3"])
    assert [t.values["scale"] for t in found.trials] == [0.3, 0.2, 0.1]
    assert len(journal.read_text().splitlines()) == 3
    with pytest.raises(InputError, match="contains scores by 'x', not 'y'"):
        sweep(recipe, over, score, journal=journal, scored_by="y")


def test_scores_of_changed_checkpoints_are_not_reused(recipe, checkpoint, tmp_path):
    journal = tmp_path / "scores.jsonl"
    calls = []
    score = lambda v, b: calls.append(1) or 0.0  # noqa: E731
    sweep(recipe, {"scale": [1.0]}, score, journal=journal)
    checkpoint("a", {"w": torch.ones(6, 5), "b": torch.ones(6)})
    sweep(recipe, {"scale": [1.0]}, score, journal=journal)
    assert len(calls) == 2


def test_into_a_module(recipe):
    (variant,) = variants(recipe, {"scale": [0.5]})
    module = nn.Module()
    module.w, module.b = nn.Parameter(torch.zeros(6, 5)), nn.Parameter(torch.zeros(6))
    assert torch.equal(variant.into(module).w, variant.weights()["w"])
    module.c = nn.Parameter(torch.zeros(1))
    with pytest.raises(MerganserError, match="'c'"):
        variant.into(module)


def test_everything_wrong_is_said_before_work(recipe):
    def never(variant, budget):
        raise AssertionError("scored")

    for over, message in (
        ({"densty": [0.1]}, "no method of this sweep has a parameter 'densty'"),
        ({"scale": [1.0, "x"]}, "scale"),
        ({"method": ["task_arithmetic", "tyes"]}, "did you mean 'ties'"),
        ({}, "nothing to sweep over"),
        ({"scale": []}, "nothing to sweep over"),
    ):
        with pytest.raises(MerganserError, match=message):
            sweep(recipe, over, never)
    document = yaml.safe_load(recipe.read_text())
    document["models"] = [{"path": "a", "weight": 0.3}, "b"]
    recipe.write_text(yaml.safe_dump(document))
    with pytest.raises(InputError, match="models\\[0\\] sets its own 'weight'"):
        sweep(recipe, {"weight": [0.1]}, never)
    with pytest.raises(InputError, match="no such recipe file"):
        sweep(recipe.parent / "no.yml", {"weight": [0.1]}, never)
    (recipe.parent / "bytes.yml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="bytes.yml: not a text in UTF-8"):
        sweep(recipe.parent / "bytes.yml", {"weight": [0.1]}, never)


def test_the_command(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scoring_for_sweep.py").write_text(
        "def score(weights, budget):\n    return -float(weights['w'].norm())\n"
    )
    best = tmp_path / "best.yml"
    arguments = ["sweep", str(recipe), "--over", "scale=0,1", "--score", "scoring_for_sweep:score", "--best", str(best)]
    result = CliRunner().invoke(build(), arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1].split() == ["score", "on", "scale"]
    assert "share the best score" not in result.stdout
    assert result.stdout.splitlines()[-1] == f"wrote {best}"
    assert recipe.with_suffix(".sweep.jsonl").exists()
    assert yaml.safe_load(best.read_text())["parameters"]["scale"] in (0, 1)
    as_json = CliRunner().invoke(build(), [*arguments, "--json"])
    assert len(json.loads(as_json.stdout)["trials"]) == 2
    neither = CliRunner().invoke(build(), ["sweep", str(recipe), "--over", "scale=0,1"])
    assert "either --task or --score" in str(neither.exception)


def test_variants_that_no_question_tells_apart_are_named(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same_for_sweep.py").write_text("def score(weights, budget):\n    return 0.0\n")
    result = CliRunner().invoke(
        build(), ["sweep", str(recipe), "--over", "scale=0,1", "--score", "same_for_sweep:score"]
    )
    assert "2 variants share the best score" in result.stdout


def test_the_best_recipe_must_find_its_models(recipe, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    arguments = ["sweep", str(recipe), "--over", "scale=0,1", "--score", "builtins:len", "--best"]

    def refused(best):
        return str(CliRunner().invoke(build(), [*arguments, str(best)]).exception)

    assert "cannot be found from there; write it beside" in refused(tmp_path / "elsewhere" / "best.yml")
    assert "no directory" in refused(tmp_path / "absent" / "best.yml")
    assert not recipe.with_suffix(".sweep.jsonl").exists()


def test_language_models_by_their_tasks(llamas, tmp_path):
    recipe = tmp_path / "r.yml"
    models = [str(llamas / "math"), str(llamas / "code")]
    recipe.write_text(yaml.safe_dump({"method": "task_arithmetic", "base": str(llamas / "base"), "models": models}))
    result = CliRunner().invoke(
        build(),
        ["sweep", str(recipe), "--over", "scale=0.0,0.5", "--rung", "6", "--json",
         "--task", f"multiple-choice:{llamas / 'quiz.jsonl'}"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    trials = {trial["values"]["scale"]: trial["score"] for trial in json.loads(result.stdout)["trials"]}
    from merganser.evaluate import Task, language
    from merganser.evaluate.language import load

    assert language.kind_of_model(llamas / "base") == "causal-lm"
    base = load(llamas / "base", "causal-lm").module
    assert trials[0.0] == Task("q", "multiple-choice", str(llamas / "quiz.jsonl")).score(base, str(llamas / "base"), 6)


def test_rungs_beyond_the_questions_of_a_task_ask_all_of_them(llamas, tmp_path):
    recipe = tmp_path / "r.yml"
    models = [str(llamas / "math"), str(llamas / "code")]
    recipe.write_text(yaml.safe_dump({"method": "task_arithmetic", "base": str(llamas / "base"), "models": models}))
    quiz = llamas / "quiz.jsonl"
    asked = len(quiz.read_text().splitlines())
    asked -= asked // 5  # held out
    arguments = ["sweep", str(recipe), "--over", "scale=0.0,0.5", "--task", f"multiple-choice:{quiz}"]
    result = CliRunner().invoke(build(), [*arguments, "--rung", "2", "--rung", "1000", "--rung", "2000"])
    assert result.exit_code == 0, result.output
    assert f"(on {asked})" in result.output
    assert "1000" not in result.output
    records = [json.loads(line) for line in recipe.with_suffix(".sweep.jsonl").read_text().splitlines()]
    assert [record["budget"] for record in records] == [2, 2, asked]
    assert all(len(record["answers"][0]) == record["budget"] for record in records)


def test_one_changed_value_is_another_model(tmp_path):
    for name in ("base", "tuned"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.zeros(1024, 2048)}, tmp_path / name / "model.safetensors")
    recipe = {"method": "task_arithmetic", "base": str(tmp_path / "base"), "models": [str(tmp_path / "tuned")]}
    file = tmp_path / "tuned" / "model.safetensors"

    def total(variant, budget):
        return float(variant.weights()["w"].sum())

    def best():
        return sweep(recipe, {"scale": [1.0]}, total, journal=tmp_path / "scores.jsonl").trials[0].score

    assert best() == 0
    before = file.stat()
    with file.open("r+b") as weights:
        weights.seek(10_000)
        weights.write(torch.ones(64).numpy().tobytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert best() == 64
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == 2


def test_a_model_that_changes_while_it_is_scored(recipe, tmp_path):
    files = list(tmp_path.rglob("*.safetensors"))

    def score(variant, budget):
        for file in files:
            os.utime(file, ns=(1, 1))
        return 1.0

    with pytest.raises(InputError, match="was written, replaced or removed during"):
        sweep(recipe, {"scale": [1.0]}, score, journal=tmp_path / "scores.jsonl")
    assert not (tmp_path / "scores.jsonl").exists()


def test_two_sweeps_do_not_share_a_journal(recipe, tmp_path):
    journal = tmp_path / "scores.jsonl"

    def score(variant, budget):
        with pytest.raises(InputError, match="another process is writing there"):
            sweep(recipe, {"scale": [1.0, 2.0]}, score, journal=journal)
        return variant.values["scale"]

    sweep(recipe, {"scale": [1.0, 2.0]}, score, journal=journal)
    assert len(journal.read_text().splitlines()) == 2
    assert not list(tmp_path.glob(".*.lock"))


@pytest.mark.parametrize(
    "content", ["method: linear\n", "no line end", '{"score": 1}\n', "[" * 2000 + "\n", "\udcff\n"]
)
def test_a_file_that_is_no_journal_is_never_changed(recipe, tmp_path, content):
    file = tmp_path / "mine"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match="mine.*: not "):
        sweep(recipe, {"scale": [1.0]}, lambda variant, budget: 1.0, journal=file)
    assert file.read_bytes() == content.encode(errors="surrogateescape")
