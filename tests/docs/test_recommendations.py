"""What docs/choosing.md recommends is what the stored results show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.readme import kept, of_three
from benchmarks.records import stored

PAGE = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text(encoding="utf-8")
CELLS = [
    [cell.strip() for cell in row.split("|")]
    for row in re.findall(r"^\| ([^|]+\|[^|]+\|[^|]*) \|$", PAGE, re.MULTILINE)
]
ROWS = {row[0]: [re.findall(r"`(\w+)`", cell) for cell in row[1:]] for row in CELLS}


def first(models: str) -> str:
    """Return the method that the page says to start with."""
    return ROWS[models][0][0]


@pytest.mark.parametrize("experts", ["8 text", "14 text", "20 text", "10 image"])
def test_many_encoders_start_with_the_method_that_keeps_most(experts: str) -> None:
    scores = kept()[experts]
    assert first("three or more classifiers or encoders of one base") == max(scores, key=lambda name: scores[name])


def test_two_encoders_start_with_the_method_that_keeps_most() -> None:
    scores = kept()["2 text"]
    assert first("two classifiers or encoders of one base") == max(scores, key=lambda name: scores[name])


def test_language_models_start_with_the_method_that_is_best_untuned_and_go_on_to_the_best_tuned() -> None:
    scores = of_three()["language models"]
    start, more = ROWS["three or more language models of one base"]
    best, second = (max(scores, key=lambda name: scores[name][column]) for column in (0, 1))
    assert start == [second]
    assert best in more
    assert scores[best][0] - scores[second][0] < 0.035, "one standard error of a score"
    tried = {
        row: found["scores"]["mean"]["value"] for row, found in stored("evolve_skills")["results"]["models"].items()
    }
    assert first("two language models of one base") == "ties"
    assert tried["TIES"] == max(tried[row] for row in ("TIES", "SLERP", "task arithmetic"))


def test_scale_one_of_tsv_loses_little_on_encoders_and_much_on_language_models() -> None:
    found = {kind: own["tsv"] for kind, own in of_three().items()}
    assert all(tuned - plain < 0.05 for kind, (tuned, plain) in found.items() if kind != "language models")
    assert found["language models"][1] < of_three()["language models"]["task_arithmetic"][1]
