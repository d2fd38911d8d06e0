"""A study whose answers would be decided by something else is not continued, and the error names what has changed."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from safetensors.torch import load_file, save_file

from merganser.errors import InputError
from merganser.evaluate.generation import STOPS, Generation
from merganser.evolve import loading
from merganser.evolve.cache import answer_keys
from merganser.evolve.runs import start

pytest.importorskip("pymoo")

RUN = """
base: ./base
models: {math: ./math, code: ./code}
method: task_arithmetic
space: {weight: {low: 0, high: 1.5, per: model}}
tasks:
  quiz: {kind: multiple-choice, data: ./quiz.jsonl, subset: 4, options: {shots: 1, examples: ./solved.jsonl}}
  sums: {kind: generation, data: ./sums.jsonl, subset: 2, options: {max_new_tokens: 2}}
  own: {kind: function, function: "own_fitness:ask", items: 10}
objectives: [{name: mean, measures: {quiz: 0.4, sums: 0.3, own: 0.3}}]
search: {algorithm: random, population: 5, generations: 1}
model: {kind: causal-lm}
"""


@pytest.fixture
def folder(llamas, tmp_path, monkeypatch):
    for name in ("base", "math", "code"):
        shutil.copytree(llamas / name, tmp_path / name)
    lines = (llamas / "quiz.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "quiz.jsonl").write_text("".join(lines[:20]))
    (tmp_path / "solved.jsonl").write_text("".join(lines[30:33]))
    shutil.copy(llamas / "sums.jsonl", tmp_path)
    (tmp_path / "run.yml").write_text(RUN)
    (tmp_path / "own_fitness.py").write_text(
        "from own_rules import WORTH\n\n\ndef ask(model, items):\n    return [WORTH] * len(items)\n"
    )
    (tmp_path / "own_rules.py").write_text("WORTH = 1.0\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("own_fitness", "own_rules"):
        sys.modules.pop(name, None)


@pytest.fixture
def interrupted(folder):
    def stop(event):
        if event.phase == "search" and event.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(folder / "run.yml", folder / "s.sqlite", on_event=stop)
    return folder / "s.sqlite"


def change_weights(path):
    tensors = load_file(path)
    tensors["lm_head.weight"][0, 0] += 1e-3
    save_file(tensors, path, {"format": "pt"})


def change_json(path):
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, "rope_theta": 5000.0, "top_k": 3}))


def edit(old, new, count=1):
    def change(path):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, count))

    return change


CHANGES = {
    "base/model.safetensors": (change_weights, "base has changed"),
    "code/model.safetensors": (change_weights, "code has changed"),
    "base/config.json": (change_json, "base/config.json has changed"),
    "math/config.json": (change_json, "math/config.json has changed"),
    "base/generation_config.json": (change_json, "base/generation_config.json has changed"),
    "base/tokenizer.json": (edit("w0", "v0"), "base/tokenizer.json has changed"),
    "base/tokenizer_config.json": (edit("{", '{"model_max_length": 40, '), "base/tokenizer_config.json has changed"),
    "base/chat_template.jinja": (lambda path: path.write_text("{{ messages }}"), "base/chat_template.jinja is new"),
    "quiz.jsonl": (edit('"question": "', '"question": "w2 '), "tasks.quiz.data has changed"),
    "sums.jsonl": (edit("so it is 0", "so it is 1"), "tasks.sums.data has changed"),
    "solved.jsonl": (edit('"question": "', '"question": "w1 ', 3), "tasks.quiz.examples has changed"),
    "own_fitness.py": (edit("return", "return 1 *"), "own_fitness.py has changed"),
    "own_rules.py": (edit("1.0", "0.5"), "own_rules.py has changed"),
}


def test_changing_any_input_is_refused_by_name(interrupted, folder):
    for name, (change, message) in CHANGES.items():
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        change(path)
        with pytest.raises(InputError, match=message):
            start(folder / "run.yml", interrupted, resume=True)
        path.unlink() if before is None else path.write_bytes(before)
    assert start(folder / "run.yml", interrupted, resume=True).ended


def test_another_default_is_refused_by_name(interrupted, folder, monkeypatch):
    """As another version of the library may have."""
    defaults = tuple(["END"] if value == STOPS else value for value in Generation.__init__.__defaults__)
    monkeypatch.setattr(Generation.__init__, "__defaults__", defaults)
    with pytest.raises(InputError, match="tasks.sums.stop has changed"):
        start(folder / "run.yml", interrupted, resume=True)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("shots: 1", "shots: 2", "tasks.quiz.options.shots"),
        ("max_new_tokens: 2", "max_new_tokens: 3", "tasks.sums.options.max_new_tokens"),
        ("max_new_tokens: 2", 'max_new_tokens: 2, stop: ["w3"]', "tasks.sums.options.stop"),
        ("max_new_tokens: 2", 'max_new_tokens: 2, prompt: "{question}"', "tasks.sums.options.prompt"),
        ("./sums.jsonl, subset: 2", "./sums.jsonl, subset: 3", "tasks.sums.subset"),
        ("items: 10", "items: 12", "tasks.own.items"),
        ("generations: 1", "generations: 1, split_seed: 1", "search.split_seed"),
        ("kind: causal-lm", "kind: causal-lm, dtype: bfloat16", "model.dtype"),
        ("kind: causal-lm", "kind: causal-lm, tokenizer: ./math", "model.tokenizer"),
    ],
)
def test_a_changed_setting_is_refused_by_name(interrupted, folder, old, new, named):
    edit(old, new)(folder / "run.yml")
    with pytest.raises(InputError, match=f"run.yml: {named} differs from the run file"):
        start(folder / "run.yml", interrupted, resume=True)


def test_more_questions_are_blamed_on_the_questions(interrupted, folder):
    with (folder / "quiz.jsonl").open("a") as file:
        file.write(json.dumps({"question": "w1 w2", "options": ["w1", "w2"], "answer": 0}) + "\n")
    with pytest.raises(InputError, match="tasks.quiz.data has changed"):
        start(folder / "run.yml", interrupted, resume=True)


@pytest.mark.parametrize(
    "name", [name for name in CHANGES if name.split("/")[0] not in ("own_fitness.py", "own_rules.py")]
)
def test_stored_answers_are_not_reused_after_a_change(folder, name):
    """Except those of the other task, or of the other model."""

    def keys():
        evaluate = loading.load(folder / "run.yml").evaluate
        weights = evaluate._weights("code", None)
        return {
            f"{task}, question {item}": key
            for task in ("quiz", "sums")
            for item, key in enumerate(answer_keys(evaluate.examiners[task], weights, range(20)))
        }

    before = keys()
    CHANGES[name][0](folder / name)
    changed = {place for place, key in keys().items() if key != before[place]}
    expected = {"quiz.jsonl": ["quiz, question 0"], "sums.jsonl": ["sums, question 0"], "math/config.json": []}
    expected["solved.jsonl"] = [place for place in before if place.startswith("quiz")]
    assert changed == set(expected.get(name, before))
