"""The benchmark of forgetting, with a training that takes no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import forgetting
from benchmarks.zoo.language_skills import Skill
from benchmarks.zoo.stories_skills import Schedule


def test_the_line_leads_from_the_weights_before_to_those_after(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)

    def fit(model: Any, tokenizer: Any, examples: Any, seed: int, schedule: Schedule, on_step: Any) -> None:
        for step in range(schedule.steps):
            with torch.no_grad():
                model.weight += 1 / schedule.steps
            on_step(step + 1)

    monkeypatch.setattr(forgetting, "fit", fit)
    monkeypatch.setattr(forgetting.Setting, "tokenizer", lambda self: None)
    setting = forgetting.Setting(Path(), {}, 1, 1, Schedule(steps=16))
    skill = Skill("questions", [], [])
    found = forgetting.run_stage(
        model, skill, 0, setting, kept=lambda m: 1 - m.weight.item() ** 2, learned=lambda m: m.weight.item()
    )
    assert [row["at"] for row in found["training"]] == list(range(0, 17, 2))
    for way, ends in (("training", (0, 16)), ("path", (0.0, 1.0))):
        first, last = found[way][0], found[way][-1]
        assert (first["at"], last["at"]) == ends
        assert (first["kept"], first["learned"]) == (1.0, 0.0)
        assert (last["kept"], last["learned"]) == (0.0, 1.0)
    assert found["take"] == pytest.approx(0.5)
    assert model.weight.item() == 1.0  # the next stage goes on from there
