"""`merganser auto`: what it writes, says and returns."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import merganser as mg
from merganser.cli import build
from merganser.errors import MerganserError
from merganser.report.directories import report
from support.llamas import llamas, transformers

__all__ = ["llamas", "transformers"]


def invoke(*words):
    result = CliRunner().invoke(build(), ["auto", *map(str, words)])
    if isinstance(result.exception, MerganserError):
        raise result.exception
    return result


@pytest.fixture
def models(llamas):
    return [llamas / name for name in ("base", "math", "code")]


def test_a_race_that_says_no_writes_nothing_but_its_reasons(models, llamas, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = tmp_path / "out"
    words = [*models, out, "--data", f"multiple-choice:{llamas / 'quiz.jsonl'}", "--candidate", "task_arithmetic"]
    result = invoke(*words, "--budget", "2000")
    assert result.exit_code == 1
    assert not out.exists()
    assert "do not merge: keep" in result.stdout
    assert "to merge anyway" in result.stdout
    assert max(map(len, result.stdout.split("do not merge")[1].splitlines()[:4])) <= 60
    beside = tmp_path / "out.auto"
    assert sorted(path.name for path in beside.iterdir()) == [
        "answers.jsonl", "decision.json", "recipe.yml", "report.html",
    ]  # fmt: skip
    asked = (beside / "answers.jsonl").read_text()
    again = invoke(*words, "--budget", "2000", "--json")
    found = json.loads(again.stdout)
    assert (found["verdict"], found["path"], again.exit_code) == ("do not merge", None, 1)
    assert (beside / "answers.jsonl").read_text() == asked, "a race that has ended is not run again"
    page, (summary,) = report(beside)
    assert summary["kind"] == "autopilot"
    assert "The race" in page.render()
    merged = CliRunner().invoke(build(), ["merge", str(beside / "recipe.yml"), str(out)])
    assert merged.exit_code == 0
    with pytest.raises(MerganserError, match="exists already"):
        invoke(*words)
    other = tmp_path / "quiz.jsonl"
    other.write_text((llamas / "quiz.jsonl").read_text().replace("w1 ", "w2 "))
    with pytest.raises(MerganserError, match="the answers of another race"):
        invoke(*models, out, "--data", f"multiple-choice:{other}", "--overwrite")


def test_without_data_the_default_is_written(models, tmp_path):
    result = invoke(*models, tmp_path / "out", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (found["verdict"], found["kept"]) == ("no evidence", "task_arithmetic scale=0.5")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_questions_without_answers_take_those_of_the_expert_of_their_name(models, llamas, tmp_path):
    records = [json.loads(line) for line in (llamas / "quiz.jsonl").read_text().splitlines()]
    for name, answers in (("labelled", 1), ("bare", 0)):
        lines = [record if answers else {k: v for k, v in record.items() if k != "answer"} for record in records]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [*models, tmp_path / "out", "--candidate", "task_arithmetic", "--json"]
    bare = [f"--data={name}=multiple-choice:{tmp_path / 'bare.jsonl'}" for name in ("math", "code")]
    found = json.loads(invoke(*words, *bare).stdout)
    assert set(found["loss"]["disagreement"]) == {"math", "code"}
    assert found["loss"]["error"] > 0
    assert "is expected to lose" in found["text"]
    answers = [json.loads(line) for line in (tmp_path / "out.auto" / "answers.jsonl").read_text().splitlines()]
    own = [record["answers"]["math"] for record in answers if record.get("label") == "math"]
    assert {value for values in own for value in values} == {1.0}, "the expert agrees with itself"
    shutil.rmtree(tmp_path / "out.auto")
    with pytest.raises(MerganserError, match="call it like that expert: math=multiple-choice:"):
        invoke(*words, f"--data=quiz=multiple-choice:{tmp_path / 'bare.jsonl'}")
    with pytest.raises(MerganserError, match="'math' has no answers and 'quiz' has"):
        invoke(*words, bare[0], f"--data=quiz=multiple-choice:{tmp_path / 'labelled.jsonl'}")


def test_a_merge_that_wins_is_written(models, tmp_path):
    """Perplexity of a text that the mean of both experts is asked for: any difference is real, since answers are."""
    lines = [{"text": f"w{i % 40} w{(3 * i) % 40} w{(7 * i) % 40}"} for i in range(90)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = invoke(*models, tmp_path / "out", "--data", f"perplexity:{tmp_path / 'texts.jsonl'}", "--candidate", "tsv")
    found = json.loads((tmp_path / "out.auto" / "decision.json").read_text())
    assert (result.exit_code == 0) == (found["verdict"] == "merge") == (tmp_path / "out").exists()
    assert found["score"]["value"] < 0, "minus the loss"


def test_what_is_wrong_is_said_before_work(models, llamas, tmp_path):
    quiz = f"quiz=multiple-choice:{llamas / 'quiz.jsonl'}"
    few, known = tmp_path / "few.jsonl", tmp_path / "known.npy"
    np.save(known, np.ones((3, 60)))
    few.write_text("".join((llamas / "quiz.jsonl").read_text().splitlines(keepends=True)[:5]))
    for message, words in (
        ("too small for", ["--data", quiz, "--budget", "20"]),
        ("is not a time", ["--data", quiz, "--budget", "soon"]),
        ("5 questions are too few", ["--data", f"multiple-choice:{few}"]),
        ("unknown kind", ["--data", f"quizz:{few}"]),
        ("expected TASK=FILE", ["--data", quiz, "--calibration", "quiz"]),
        ("no task 'quizz'; did you mean 'quiz'", ["--data", quiz, "--calibration", f"quizz={known}"]),
        ("no such file", ["--data", quiz, "--calibration", "quiz=absent.npy"]),
        ("two tasks are called 'quiz'", ["--data", quiz, "--data", quiz]),
        ("did you mean 'tsv'", ["--candidate", "tvs"]),
    ):
        with pytest.raises(MerganserError, match=message):
            invoke(*models, tmp_path / "out", *words)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["few.jsonl", "known.npy"], message
    with pytest.raises(MerganserError, match="is in it|it is the input"):
        invoke(*models, models[0], "--overwrite")


def test_models_that_a_task_cannot_ask_are_refused(models, llamas, tmp_path):
    encoder = shutil.copytree(models[0], tmp_path / "encoder")
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    quiz = f"multiple-choice:{llamas / 'quiz.jsonl'}"
    message = "'quiz': kind multiple-choice asks a language model, not a model of kind encoder, which .*encoder is"
    with pytest.raises(MerganserError, match=message):
        invoke(encoder, *models[1:], tmp_path / "out", "--data", quiz)
    with pytest.raises(MerganserError, match=message):
        mg.evaluate.evaluate(encoder, tasks=[mg.evaluate.Task.parse(quiz)])
    with pytest.raises(MerganserError, match="kind classification asks a sequence classifier"):
        mg.evaluate.Task("labels", "classification", "labels.jsonl").check_model("llama", "causal-lm")


def test_a_killed_command_goes_on(models, llamas, tmp_path):
    """Killed after some answers were noted; the same command asks only what is missing."""
    words = [*models, tmp_path / "out", "--data", f"multiple-choice:{llamas / 'quiz.jsonl'}", "--candidate", "ties"]
    code = (
        "import os, sys\nfrom merganser.tuning.autopilot import answers\nadd = answers.AnswerJournal.add\n"
        "def stop(self, *a, **k):\n    add(self, *a, **k)\n    if len(self.answers) == 5: os.kill(os.getpid(), 9)\n"
        "answers.AnswerJournal.add = stop\nfrom merganser.cli import main\n"
        "sys.argv = ['merganser', 'auto', *sys.argv[1:]]\nmain()\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, check=False)
    assert killed.returncode == -9
    journal = tmp_path / "out.auto" / "answers.jsonl"
    before = journal.read_text()
    assert len(before.splitlines()) == 5
    resumed = invoke(*words, "--json")
    assert journal.read_text().startswith(before)
    whole = invoke(*words[:3], tmp_path / "other", *words[4:], "--json")
    one, other = (
        {key: value for key, value in json.loads(run.stdout).items() if key not in ("seconds", "path", "report")}
        for run in (resumed, whole)
    )
    assert one == other
