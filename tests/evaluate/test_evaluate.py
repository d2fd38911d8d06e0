"""`evaluate` on tiny Llamas: what is sound passes, what is broken is said to be."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import merganser as mg
from merganser.checkpoints.memory import StateDict
from merganser.cli import build
from merganser.engine.origin import LOCK_FILE
from merganser.errors import InputError
from merganser.evaluate import Task, evaluate, normalized_accuracy
from merganser.evaluate.language import check_chat_template, check_perplexity
from merganser.evaluate.models import Scores, compare_tasks, find_recorded_parents
from merganser.evaluate.weights import check_weights


def statuses(found):
    return {check.name: check.status for check in found.checks}


@pytest.fixture
def copy(llamas, tmp_path):
    """A copy of the base whose weights and files may be spoilt."""
    path = tmp_path / "copy"
    shutil.copytree(llamas / "base", path)
    return path


def spoil(path, change):
    tensors = load_file(path / "model.safetensors")
    save_file(change({k: v.clone() for k, v in tensors.items()}), path / "model.safetensors", {"format": "pt"})


def edit(path, **changes):
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | changes))


def test_a_model_against_its_parents(llamas):
    quiz = Task("quiz", "multiple-choice", str(llamas / "quiz.jsonl"))
    words = Task.parse(f"words=perplexity:{llamas / 'texts.tsv'}")
    found = evaluate(llamas / "base", [llamas / "math", llamas / "code"], [quiz, words], limit=12)
    assert statuses(found) == {
        "weights": "pass", "loads": "pass", "vocabulary": "pass", "outputs": "pass", "end token": "pass",
        "perplexity": found.checks[-3].status, "chat template": "skip", "quiz": found.checks[-1].status,
    }  # fmt: skip
    assert len(found.parents) == 2
    best = max(scores.tasks["quiz"] for scores in found.parents.values())
    assert found.normalized == pytest.approx(found.scores.tasks["quiz"] / best)
    assert 0 < found.scores.tasks["words"] < 20
    assert json.loads(json.dumps(found.to_dict()))["scores"]["tasks"]["quiz"] == found.scores.tasks["quiz"]


def test_a_merge_is_compared_with_what_its_lock_file_says_it_was_made_of(llamas, tmp_path):
    import merganser as mg

    models = [str(llamas / "math"), str(llamas / "code")]
    out = mg.run({"method": "linear", "models": [{"path": path, "weight": 0.5} for path in models]}, tmp_path / "out")
    assert find_recorded_parents(out) == models
    assert list(evaluate(out).parents) == models
    assert not evaluate(out, ()).parents, "none, if none are wanted"
    gone = tmp_path / "gone"
    shutil.copytree(out, gone)
    (gone / LOCK_FILE).write_text((out / LOCK_FILE).read_text().replace(models[0], "/nowhere/math"))
    assert find_recorded_parents(gone) == models[1:]
    assert find_recorded_parents(llamas / "base") == []


@pytest.mark.parametrize(
    ("own", "parents", "status"),
    [(0.7, (0.6, 0.8), "pass"), (0.55, (0.6, 0.8), "pass"), (0.3, (0.6, 0.8), "warn"), (0.9, (0.6, 0.8), "pass")],
)
def test_a_merge_that_lost_what_all_its_parents_can_is_doubtful(tmp_path, own, parents, status):
    lines = [json.dumps({"text": "w1", "label": 0})] * 100
    (tmp_path / "quiz.jsonl").write_text("\n".join(lines))
    task = Task("quiz", "classification", str(tmp_path / "quiz.jsonl"))
    others = {str(score): Scores(None, {"quiz": score}) for score in parents}
    (check,) = compare_tasks([task], Scores(None, {"quiz": own}), others, None)
    assert (check.name, check.status) == ("quiz", status)
    (few,) = compare_tasks([task], Scores(None, {"quiz": own}), others, 4)
    assert few.status == "pass", "four questions prove nothing"


class StubHarness:
    """Three questions of a task of the harness, the first of them always answered rightly."""

    def __init__(self, task, tokenizer, shots=0):
        assert task == "arc_easy"
        self.directions = {"score": "lower" if shots else "higher"}

    def __len__(self):
        return 3

    def __call__(self, model, items):
        return {"score": [float(item == 0) for item in items]}


def test_tasks_of_the_harness_are_asked_like_files(llamas, monkeypatch):
    monkeypatch.setattr("merganser.evaluate.tasks.Harness", StubHarness)
    task = Task.parse("lm-eval:arc_easy")
    assert (task.name, task.higher_is_better) == ("arc_easy", True)
    assert not Task("arc", "lm-eval", "arc_easy", {"shots": 5}).higher_is_better
    found = evaluate(llamas / "base", [llamas / "math"], [task])
    assert found.scores.tasks == {"arc_easy": pytest.approx(1 / 3)}
    result = CliRunner().invoke(build(), ["evaluate", str(llamas / "base"), "--task", "lm-eval:arc_easy", "--json"])
    assert json.loads(result.stdout)["scores"]["tasks"] == {"arc_easy": pytest.approx(1 / 3)}


def test_broken_weights_are_not_even_loaded(copy):
    spoil(copy, lambda t: t | {"model.norm.weight": torch.full_like(t["model.norm.weight"], math.nan)})
    found = evaluate(copy)
    assert found.verdict == "broken"
    assert "'model.norm.weight' with 16" in found.checks[0].message
    result = CliRunner().invoke(build(), ["evaluate", str(copy), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verdict"] == "broken"


def test_missing_weights_fail(copy):
    spoil(copy, lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up" not in k})
    found = evaluate(copy)
    assert statuses(found)["loads"] == "fail"
    assert "layers.1.mlp.up_proj" in next(c for c in found.checks if c.name == "loads").message


def test_outputs_that_overflow(copy):
    spoil(copy, lambda t: t | {"model.embed_tokens.weight": t["model.embed_tokens.weight"] * 3e38})
    found = evaluate(copy)
    assert found.verdict == "broken"


def test_ends_and_vocabularies(copy):
    edit(copy / "generation_config.json", eos_token_id=7)
    assert statuses(evaluate(copy))["end token"] == "warn"
    edit(copy / "generation_config.json", eos_token_id=10**6)
    assert statuses(evaluate(copy))["end token"] == "fail"


def test_not_a_transformers_model(tmp_path):
    save_file({"w": torch.ones(2, 2)}, tmp_path / "plain.safetensors")
    found = evaluate(tmp_path / "plain.safetensors")
    assert (found.verdict, statuses(found)) == ("sound", {"weights": "pass", "loads": "skip"})
    (tmp_path / "texts.tsv").write_text("0\tw1\n")
    with pytest.raises(InputError, match="tasks need a model"):
        evaluate(tmp_path / "plain.safetensors", tasks=[Task("q", "perplexity", str(tmp_path / "texts.tsv"))])


def test_weights():
    assert check_weights(StateDict({"a": torch.zeros(2, 3), "b": torch.zeros(3)})).status == "warn"
    assert check_weights(StateDict({"a": torch.tensor(1.0), "n": torch.tensor([1])})).status == "pass"
    big = torch.zeros(70_000, 3)
    big[-1, -1] = 1
    assert check_weights(StateDict({"a": big})).status == "pass"
    big[-1, -1] = -math.inf
    assert "'a' with 1 of them" in check_weights(StateDict({"a": big})).message


def test_perplexity_thresholds():
    assert check_perplexity(10.0, {"a": 9.0, "b": 3.0}, 100, 60).status == "pass"
    assert check_perplexity(14.0, {"a": 9.0}, 100, 60).status == "warn"
    assert check_perplexity(99.0, {"a": 2.0}, 100, 60).status == "fail"
    assert check_perplexity(101.0, {}, 100, 60).status == "fail"
    assert check_perplexity(101.0, {"a": 99.0}, 100, 60).status == "fail"
    known = check_perplexity(101.0, {"a": 2.0, "b": 800.0}, 100, 60)
    assert (known.status, known.message.endswith("as is its parent b (800)")) == ("warn", True)
    assert check_perplexity(50.0, {}, 100, 60).status == "pass"
    assert check_perplexity(70.0, {}, 100, 60).status == "warn", "worse than the frequencies of words"
    assert check_perplexity(22_930.0, {}, 50_000, 160).status == "fail"


def test_limits_draw_questions_of_every_label(tmp_path):
    from merganser.evaluate.sampling import order_items

    lines = [json.dumps({"text": "w1", "label": label}) for label in range(20) for _ in range(10 if label else 50)]
    (tmp_path / "sorted.jsonl").write_text("\n".join(lines))
    examiner = Task("t", "classification", str(tmp_path / "sorted.jsonl")).examiner("none")
    order = order_items(examiner)
    assert sorted(order) == list(range(240))
    assert order == order_items(examiner), "every model is asked the same"
    assert order != order_items(examiner, seed=1)
    labels = [examiner.records[item]["label"] for item in order]
    for limit in (24, 48, 120, 240):
        drawn = [labels[:limit].count(label) for label in range(20)]
        assert all(abs(n - limit * (50 if label == 0 else 10) / 240) <= 1 for label, n in enumerate(drawn))


def test_chat_templates(llamas, transformers):
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(llamas / "base"))
    assert check_chat_template(tokenizer, False).status == "skip"
    assert check_chat_template(tokenizer, True).status == "warn"
    turns = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    tokenizer.chat_template = turns
    assert "'<|im_start|>', which is not one token" in check_chat_template(tokenizer, False).message
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    assert check_chat_template(tokenizer, False).status == "pass"
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert check_chat_template(tokenizer, False).status == "fail"
    tokenizer.chat_template = "nothing"
    assert "drops" in check_chat_template(tokenizer, False).message


def test_tasks_on_the_command_line():
    assert Task.parse("quiz=exact-match:a:b.jsonl") == Task("quiz", "exact-match", "a:b.jsonl")
    assert Task.parse("classification:dir/x.tsv").name == "x"
    for text, message in (
        ("x", "expected"),
        ("a=clasification:f", "did you mean 'classification'"),
        ("k:", "expected"),
    ):
        with pytest.raises(InputError, match=message):
            Task.parse(text)


def test_exact_match_compares_first_lines():
    from merganser.evaluate.generation import first_line

    assert first_line("  forty two \nand more") == "forty two"
    assert first_line("x") == "x"
    assert first_line(" \n") == ""


def test_normalized_accuracy():
    assert normalized_accuracy({"a": 0.9, "b": 0.4}, {"a": 0.9, "b": 0.8, "c": 1.0}) == pytest.approx(0.75)
    with pytest.raises(InputError, match="no expert's score on 'x'"):
        normalized_accuracy({"x": 1.0}, {"a": 1.0})
    with pytest.raises(InputError, match="cannot normalise by it"):
        normalized_accuracy({"a": 1.0}, {"a": 0.0})


def test_the_command(llamas):
    result = CliRunner().invoke(
        build(),
        ["evaluate", str(llamas / "math"), "--parent", str(llamas / "base"), "--limit", "5",
         "--task", f"quiz=multiple-choice:{llamas / 'quiz.jsonl'}"],
    )  # fmt: skip
    assert result.exit_code in (0, 1), result.output
    assert "perplexity" in result.stdout
    assert "quiz" in result.stdout


def test_the_command_finds_the_parents_and_writes_a_page(llamas, tmp_path):
    models = [str(llamas / name) for name in ("math", "code")]
    mg.run({"method": "linear", "models": models}, tmp_path / "out")
    page = tmp_path / "page.html"
    quiz = f"quiz=multiple-choice:{llamas / 'quiz.jsonl'}"
    asked = ["evaluate", str(tmp_path / "out"), "--limit", "5", "--task", quiz, "--html", str(page), "--json"]
    result = CliRunner().invoke(build(), asked)
    assert result.exit_code in (0, 1), result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert list(found["parents"]) == models, "as the lock file says"
    assert found["questions"] == {"quiz": 5}
    text = page.read_text()
    assert f"{tmp_path / 'out'} is {found['verdict']}" in text
    assert "95 % intervals over 5 questions" in text
    assert text.count("<svg") == 1


@pytest.mark.parametrize(
    ("name", "kind", "content", "message"),
    [
        ("a.jsonl", "multiple-choice", '{"question": "?", "options": ["a", "b"], "answer": 0}\n{"qu', "jsonl, line 2"),
        ("a.jsonl", "multiple-choice", '{"question": "?", "options": 3, "answer": 0}', "a.jsonl, line 1"),
        ("a.jsonl", "generation", '{"question": "?", "answer": {}}', "a.jsonl, line 1"),
        ("a.tsv", "classification", "first\tw1", "a.tsv, line 1"),
        ("a.json", "perplexity", '[{"text": "w1"}, 5]', "a.json: record 1"),
        ("a.jsonl", "perplexity", '\x00\x01', "a.jsonl, line 1"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_not_a_broken_model(llamas, tmp_path, name, kind, content, message):
    (tmp_path / name).write_text(content)
    result = CliRunner().invoke(build(), ["evaluate", str(llamas / "math"), "--task", f"{kind}:{tmp_path / name}"])
    assert isinstance(result.exception, InputError), result.output
    assert message in str(result.exception)
    assert "perplexity of" not in result.output, "nothing is loaded before the questions are checked"


def test_questions_that_do_not_fit_are_no_fault_of_the_model(llamas, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": "?", "options": ["w1", "w2 " * 70], "answer": 0}))
    with pytest.raises(InputError, match="an option has 70 tokens"):
        evaluate(llamas / "math", tasks=[Task("long", "multiple-choice", str(tmp_path / "long.jsonl"))])


def test_a_damaged_tokenizer_is_a_broken_model(copy):
    (copy / "tokenizer.json").write_text("{")
    found = evaluate(copy)
    assert found.verdict == "broken"
    assert "tokenizer cannot be loaded" in found.checks[-1].message


def test_a_model_without_a_tokenizer_is_doubtful_not_broken(copy):
    for file in copy.glob("token*"):
        file.unlink()
    found = evaluate(copy)
    assert found.verdict == "doubtful"
    assert "no tokenizer files" in found.checks[-1].message


def test_loading_shows_no_bars_of_another_library(llamas, capfd, transformers):
    from merganser.evaluate.loaders import Loader

    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        Loader("causal-lm", str(llamas / "math"))()
        assert "Loading weights" not in capfd.readouterr().err
        assert logging.is_progress_bar_enabled()
    finally:
        if not shown:
            logging.disable_progress_bar()
