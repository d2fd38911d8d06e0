"""Answers of endpoints are asked once for all studies; calibrations come from the harness' samples."""

from __future__ import annotations

import json

import numpy as np
import pytest

from merganser.errors import InputError
from merganser.evaluate.examiners import MultipleChoice
from merganser.evaluate.loaders import Loader
from merganser.evolve import calibrations
from merganser.evolve.cache import AnswerCache, answer_keys
from merganser.evolve.fitness import MergedModels
from merganser.evolve.space import SearchParameter, Space


def test_only_what_is_not_known_is_asked(tmp_path):
    cache, asked = AnswerCache(tmp_path / "answers.sqlite"), []

    def examine(items):
        asked.extend(items)
        return {"score": [item / 10 for item in items], "length": [1.0] * len(items)}

    assert cache.ask(["a", "b"], [1, 2], examine) == {"score": [0.1, 0.2], "length": [1.0, 1.0]}
    assert cache.ask(["b", "c", "a"], [2, 3, 1], examine)["score"] == [0.2, 0.3, 0.1]
    assert asked == [1, 2, 3]
    assert cache.ask([], [], examine) == {}
    (tmp_path / "text").write_text("no database, but long enough to look like one" * 20)
    with pytest.raises(InputError, match="is not a file of answers"):
        AnswerCache(tmp_path / "text").ask(["a"], [1], examine)


def test_keys_change_with_whatever_changes_an_answer(llamas):
    base = str(llamas / "base")
    quiz = MultipleChoice(str(llamas / "quiz.jsonl"), base)
    same = MultipleChoice(str(llamas / "quiz.jsonl"), base, batch=3)
    keys = answer_keys(quiz, "weights", [0, 1])
    assert keys == answer_keys(same, "weights", [0, 1])
    assert len({*keys, *answer_keys(quiz, "others", [0, 1])}) == 4
    changed = MultipleChoice(str(llamas / "quiz.jsonl"), base, prompt="{question}?")
    assert not {*keys} & {*answer_keys(changed, "weights", [0, 1])}
    assert answer_keys(MultipleChoice(list(quiz.records[1:2]), base), "weights", [0]) == keys[1:]


def test_another_study_finds_the_endpoints_answers(llamas, tmp_path, monkeypatch):
    space = Space({"weight": SearchParameter(0, 1, per="model")}, models=("math", "code"))
    template = {
        "method": "task_arithmetic",
        "base": str(llamas / "base"),
        "models": [{"path": str(llamas / name)} for name in ("math", "code")],
    }
    examiners = {"quiz": MultipleChoice(str(llamas / "quiz.jsonl"), str(llamas / "base"))}

    def evaluator():
        loader = Loader("causal-lm", str(llamas / "base"))
        return MergedModels(loader, template, space, examiners, str(tmp_path / "answers.sqlite"))

    items = {"quiz": list(range(6))}
    first = evaluator()("math", items)
    monkeypatch.setattr(MultipleChoice, "__call__", lambda *a: pytest.fail("asked again"))
    assert evaluator()("math", items) == first
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        evaluator()("code", items)
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        evaluator()({"weight.math": 1.0, "weight.code": 0.0}, items)


def sample(number, **metrics):
    return json.dumps({"doc_id": number, "doc": {}, "metrics": list(metrics), **metrics})


def test_samples_of_the_harness_calibrate(tmp_path):
    for model, answers in (("a", [1.0, 0.0, 1.0]), ("b", [0.0, 1.0])):
        (tmp_path / model).mkdir()
        lines = [sample(i, acc=value, acc_norm=1 - value) for i, value in enumerate(answers)]
        (tmp_path / model / "samples_quiz_2026.jsonl").write_text("\n".join(lines))
    pattern = str(tmp_path / "*" / "samples_quiz_*.jsonl")
    np.testing.assert_array_equal(calibrations.read(pattern).answers, [[1, 0, 1], [0, 1, np.nan]])
    np.testing.assert_array_equal(calibrations.read(f"{pattern}#acc_norm").answers, [[0, 1, 0], [1, 0, np.nan]])
    with pytest.raises(InputError, match=r"line 1: no number for the metric 'acc_nrm'; did you mean 'acc_norm'"):
        calibrations.read(f"{pattern}#acc_nrm")
    with pytest.raises(InputError, match="no such file"):
        calibrations.read(str(tmp_path / "*.jsonl"))
