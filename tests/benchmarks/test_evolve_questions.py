"""Questions for language models: they are the skills' held-out examples, and items keep their order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.evolve_answers import Setting
from benchmarks.evolve_questions import QuestionExam, records
from benchmarks.zoo.cards import default_data
from benchmarks.zoo.language_skills import SKILLS, Example, Skill, load_skill

DATA = default_data()
needs_data = pytest.mark.skipif(not (DATA / "text/trec.train.tsv").exists(), reason="the data sets are not here")


@needs_data
@pytest.mark.parametrize("name", SKILLS)
def test_questions_are_many_not_trained_on_and_not_always_answered_by_the_same_option(name):
    skill = load_skill(name, DATA)
    questions = records(skill)
    assert len(questions) >= 200
    assert not {each["question"] for each in questions} & {example.prompt for example in skill.train}
    shares = np.bincount([each["answer"] for each in questions]) / len(questions)
    assert shares.max() < 0.6


def test_records_mark_the_right_option():
    skill = Skill("toy", [], [Example("a b", ("x", "y"), 1)])
    assert records(skill) == [{"question": "a b", "options": ["x", "y"], "answer": 1}]


def test_answers_come_in_the_order_of_the_items():
    def examiner(offset):
        return lambda model, items: {"score": [offset + item for item in items]}

    exam = QuestionExam(Setting(("a", "b"), 10, (0.0,)), Path(), {"a": examiner(0), "b": examiner(100)})
    assert exam.asked(None, [12, 3, 19, 0]).tolist() == [102, 3, 109, 0]
    assert exam.asked(None, [4]).tolist() == [4]
