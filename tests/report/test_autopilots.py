"""The tables of the autopilot's decision."""

from __future__ import annotations

from merganser.evolve.intervals import Interval
from merganser.report.autopilots import fill_decision, is_mean, race_table, task_table
from merganser.report.page import Page
from merganser.tuning.autopilot.decisions import Challenge, Decision

SCORE = Interval(0.5, 0.4, 0.6)


def decision(**by_task):
    challenges = (Challenge("math", SCORE, by_task), Challenge("tsv", SCORE, by_task, "math", SCORE, True))
    again = Challenge("tsv", SCORE, by_task, "task_arithmetic", SCORE, True)
    return Decision("merge", "merge: tsv", "tsv", challenges=(*challenges, again)).to_dict()


def test_scores_are_shown_task_by_task_once_for_each_contender():
    found = decision(quiz=0.4, sums=0.6)
    assert is_mean(found)
    assert task_table(found).columns == ["contender", "quiz", "sums"]
    assert task_table(found).rows == [["math", 0.4, 0.6], ["tsv", 0.4, 0.6]]
    page = Page("Autopilot")
    fill_decision(page, found)
    assert "Each score is the mean over the tasks" in page.render()


def test_one_task_needs_no_table_by_task():
    found = decision(quiz=0.5)
    assert not is_mean(found)
    page = Page("Autopilot")
    fill_decision(page, found)
    assert "over the tasks" not in page.render()
    assert not is_mean(Decision("no evidence", "no evidence", "iso_c").to_dict())


def test_a_table_without_losers_has_no_column_of_reasons():
    found = decision() | {"rungs": [{"budget": 8, "scores": {"a": 0.9, "b": 0.2}}], "rejected": {"b": "worse than a"}}
    assert race_table(found).rows == [["a", 0.9, 8, ""], ["b", 0.2, 8, "worse than a"]]
    assert race_table(found, 1).columns == ["contender", "score", "questions per task"]
