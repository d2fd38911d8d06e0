"""Questions for language models: the right option is marked, trained ones are left out, items keep their order."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import evolve_questions
from benchmarks.evolve_answers import Setting
from benchmarks.evolve_questions import BUILDERS, QuestionExam
from benchmarks.zoo.cards import default_data
from benchmarks.zoo.language_skills import load_skill

DATA = default_data()
needs_data = pytest.mark.skipif(not (DATA / "qa/asdiv.jsonl").exists(), reason="the data sets are not here")


@needs_data
@pytest.mark.parametrize("skill", BUILDERS)
def test_questions_are_short_distinct_and_not_always_answered_by_the_same_option(skill):
    questions = BUILDERS[skill](DATA)
    assert len(questions) >= 60
    for each in questions:
        assert len(set(each["options"])) == len(each["options"])
        assert 0 <= each["answer"] < len(each["options"])
    shares = np.bincount([each["answer"] for each in questions]) / len(questions)
    assert shares.min() > 0.2
    assert shares.max() < 0.6


@needs_data
def test_lettered_questions_were_not_trained_on():
    """By question and right option: a few short questions come back with other options."""
    trained = set()
    for example in load_skill("letters", DATA).train:
        question, *options, _ = example.prompt.removeprefix("Question: ").splitlines()
        trained |= {(question, option[3:]) for option in options if option[0] == example.answer}
    for each in evolve_questions.letters(DATA):
        question, *options = each["question"].splitlines()
        assert [option[:3] for option in options] == ["A. ", "B. "]
        assert (question, options[each["answer"]][3:]) not in trained
        assert each["options"][each["answer"]] == f"{'AB'[each['answer']]}{evolve_questions.END}"
        assert each["options"][2] == f"{options[each['answer']]}{evolve_questions.END}"


@needs_data
def test_reviews_differ_in_how_they_are_written_only():
    for each in evolve_questions.reviews(DATA):
        written, usual = each["options"][each["answer"]], each["options"][1 - each["answer"]]
        assert written.replace(" ", "") == usual.replace(" ", "").lower()


@needs_data
def test_the_marked_number_is_the_answer():
    rows = {row["question"]: row["answer"] for row in evolve_questions._rows(DATA, "asdiv")}
    for each in evolve_questions.arithmetic(DATA):
        assert re.match(r"\d+", rows[each["question"]])[0] == each["options"][each["answer"]]


def test_answers_come_in_the_order_of_the_items():
    def examiner(offset):
        return lambda model, items: {"score": [offset + item for item in items]}

    exam = QuestionExam(Setting(("a", "b"), 10, (0.0,)), Path(), {"a": examiner(0), "b": examiner(100)})
    assert exam.asked(None, [12, 3, 19, 0]).tolist() == [102, 3, 109, 0]
    assert exam.asked(None, [4]).tolist() == [4]
