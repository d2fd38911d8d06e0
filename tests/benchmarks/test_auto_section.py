"""The benchmark of the autopilot: how experts are spoilt, and what its section says of stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import auto
from benchmarks.reporting.parts import Table, Text
from benchmarks.reporting.sections.auto import parts
from merganser.errors import InputError

RESULTS: dict[str, Any] = {
    "tasks": ["a", "b"],
    "validation": {"a": 50, "b": 50},
    "test": {"a": 200, "b": 200},
    "grid": [{"method": m, "scale": s, "accuracy": 0.5 + 0.1 * s} for m in ("ties", "tsv") for s in (0.5, 1.0)],
    "full": 400,
    "best": {"label": "tsv scale=1", "validation": 0.6, "test": 0.7, "error": 0.02},
    "runs": [
        {"seed": 0, "best": "ties scale=1", "kept": "ties scale=1", "verdict": "merge", "asked": 36, "share": 0.09,
         "test": 0.69, "behind": 0.01, "paired": 0.015},
    ],
    "spoilt": [
        {"set": "a duplicate", "culprit": "again", "verdict": "merge", "kept": "ties scale=1", "text": "",
         "remarks": [{"kind": "duplicate", "experts": ["again", "b"], "text": "again is b once more"}]},
        {"set": "another", "culprit": "b", "verdict": "merge", "kept": "ties scale=1", "text": "", "remarks": []},
    ],
}  # fmt: skip


def text_of(results: dict[str, Any]) -> str:
    return " ".join(part.text for part in parts(results) if isinstance(part, Text))


def test_the_goal_is_met_only_within_the_error_and_the_share() -> None:
    assert "in 1 of 1 runs, with at most 9.0 %" in text_of(RESULTS)
    assert ": met." in text_of(RESULTS)
    for change in ({"behind": 0.03}, {"share": 0.11}):
        run = RESULTS["runs"][0] | change
        assert ": not met." in text_of(RESULTS | {"runs": [RESULTS["runs"][0], run]})


def test_the_luck_of_the_grid_is_beside_that_of_the_autopilot() -> None:
    assert "luck" not in text_of(RESULTS)
    assert "in 3 of 4 cases, and on average 1.5 points behind" in text_of(RESULTS | {"luck": [0.0, 0.02, -0.01, 0.05]})


def test_the_winners_of_samples_are_compared_on_test_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row is right where the other is wrong, so that the sample decides between them."""
    right = np.arange(10) < 6
    answers = [{"a": right.astype(float)}, {"a": (~right).astype(float)}]
    tests = {"first": {"a": np.ones(4)}, "second": {"a": np.zeros(4)}}
    monkeypatch.setattr(auto, "grid_answers", lambda experts, row: tests[row["method"]])
    luck = auto.measure_luck(None, [{"method": "first"}, {"method": "second"}], answers, tests["first"])
    assert set(luck) == {0.0, 1.0}
    assert 0.5 < luck.count(0.0) / auto.SAMPLES < 0.95


def test_a_culprit_that_is_not_named_is_said_to_be_so() -> None:
    table = [part for part in parts(RESULTS) if isinstance(part, Table)][-1]
    assert [row[2] for row in table.rows] == ["again is b once more", "not named"]


def test_experts_are_spoilt_as_they_should_be() -> None:
    torch.manual_seed(0)
    base = {"w": torch.randn(40, 40)}
    expert = {"w": base["w"] + 0.1 * torch.randn(40, 40)}
    stretched, shuffled = auto.stretch(expert, base), auto.shuffle(expert, base)
    assert float((stretched["w"] - base["w"]).norm()) == pytest.approx(
        20 * float((expert["w"] - base["w"]).norm()), rel=1e-4
    )
    assert torch.equal(shuffled["w"].flatten().sort().values, expert["w"].flatten().sort().values)
    assert abs(torch.nn.functional.cosine_similarity(shuffled["w"].flatten(), base["w"].flatten(), dim=0)) < 0.1


def test_tasks_name_the_zoo_of_their_experts() -> None:
    assert auto.loader(["trec", "mr"], None)[0] == "sentences"
    assert auto.loader(list(auto.IMAGE_TASKS)[:2], None)[0] == "images"
    assert auto.loader(["questions"], Path("stories"))[0] == "prompts"
    with pytest.raises(InputError, match="--base"):
        auto.loader(["questions"], None)
