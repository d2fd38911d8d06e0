"""A dry run asks one merge two questions of every task, and finds what would fail for every candidate."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from merganser.cli.evolve import app
from merganser.errors import InputError
from merganser.evolve import loading
from merganser.evolve.rehearsal import rehearse

pytest.importorskip("pymoo")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ('"toy_experts:right"', '"toy_experts:broken"'),
            r"toy.yml: tasks.right: RuntimeError: the questions are gone$",
        ),
        (('"toy_experts:right"', '"toy_experts:by_item"'), r"tasks.right: toy_experts:by_item: expected a list"),
        (("{left: 0.5", "{left.soft: 0.5"), r"objectives: nothing measures 'left.soft'; did you mean 'left'\?"),
        (('"toy_experts:build"', '"toy_experts:inputs.clone"'), r"no function 'inputs.clone'"),
    ],
)
def test_what_every_candidate_would_fail_by_is_found_in_a_dry_run(toy, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, ["run", str(toy(change)), "--dry-run"], catch_exceptions=False)
    assert not list(tmp_path.glob("*.sqlite"))


def test_the_plan_is_printed_before_the_models_are_loaded(toy):
    told = CliRunner().invoke(app, ["run", str(toy(('"toy_experts:right"', '"toy_experts:broken"'))), "--dry-run"])
    assert isinstance(told.exception, InputError)
    assert "trials " in told.stdout
    assert "tried " not in told.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{max_new_tokens: 8, chat: true}", "tasks.quiz: chat: the tokenizer of .* has no chat template"),
        ("{max_new_tokens: 64}", "tasks.quiz: max_new_tokens 64 leaves no room for a prompt in 64 tokens"),
    ],
)
def test_questions_that_the_model_cannot_be_asked(run_file, options, message):
    task = f"quiz: {{kind: generation, data: ./sums.jsonl, options: {options}}}"
    old = "quiz: {kind: multiple-choice, data: ./quiz.jsonl, subset: 8, estimator: gmp-irt, c: adaptive}"
    with pytest.raises(InputError, match=message):
        rehearse(loading.load(run_file((old, task))))


@pytest.mark.parametrize(
    ("task", "kind", "message"),
    [
        ("{kind: classification, data: ./texts.tsv}", "causal-lm", "classification asks a sequence classifier, not a"),
        ("{kind: multiple-choice, data: ./quiz.jsonl}", "masked-lm", "multiple-choice asks a language model, not a"),
        ("{kind: perplexity, data: ./texts.tsv}", "seq2seq-lm", "perplexity asks a causal language model, not a model"),
    ],
)
def test_a_model_is_asked_only_what_its_kind_answers(run_file, task, kind, message):
    old = "{kind: multiple-choice, data: ./quiz.jsonl, subset: 8, estimator: gmp-irt, c: adaptive}"
    with pytest.raises(InputError, match=f"tasks.quiz: kind {message}"):
        loading.load(run_file((old, task), ("kind: causal-lm", f"kind: {kind}")))
