"""Fine-tunes of stories15M in memory (see `benchmarks.experts`), those of `benchmarks.zoo.stories_skills`.

A skill's questions are multiple choice, answered by the language model itself: there are no heads. Test questions are
the first of those the skill holds out, validation questions the last of its training file, which training did not
reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experts import Experts, Part, changed, floats
from benchmarks.zoo.language_skills import load_skill
from benchmarks.zoo.stories_skills import Schedule, examine, train
from merganser.errors import require
from merganser.evaluate.examiners import MultipleChoice


@dataclass(frozen=True)
class Questions:
    """Questions of one skill that training has not seen."""

    test: MultipleChoice
    validation: MultipleChoice


@dataclass(frozen=True)
class LanguageExperts(Experts[Questions]):
    """Language models that answer by the likeliest option."""

    directory: Path

    @cached_property
    def _shell(self) -> Any:
        transformers = require("transformers", "hf")
        return transformers.AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()

    def backbone(self, weights: Mapping[str, Tensor]) -> nn.Module:
        self._shell.load_state_dict(weights, strict=False)  # the head is the embedding
        shell: nn.Module = self._shell
        return shell

    @torch.inference_mode()
    def ask(self, weights: Mapping[str, Tensor], items: Mapping[str, Sequence[int]], part: Part) -> dict[str, Tensor]:
        backbone = self.backbone(weights)
        found = {name: getattr(self.tasks[name], part)(backbone, chosen) for name, chosen in items.items()}
        return {name: torch.tensor(measures["score"]) > 0 for name, measures in found.items()}


def load_language_experts(
    base: Path, cache: Path, data: Path, names: Sequence[str], *, test: int, validation: int
) -> LanguageExperts:
    """The fine-tunes of the zoo, trained if it lacks them, with so many test and validation questions of each skill."""
    weights, schedule = floats(base), Schedule()
    skills = {name: load_skill(name, data) for name in names}
    for skill in skills.values():
        assert len(skill.train) >= schedule.steps * schedule.batch + validation, "training reached the validation data"
    whole = {name: floats(train(skill, base, cache, 0, schedule)) for name, skill in skills.items()}
    moved = changed(weights, whole.values())
    return LanguageExperts(
        weights,
        {name: {tensor: expert[tensor] for tensor in moved} for name, expert in whole.items()},
        {
            name: Questions(
                examine(skill, base, test),
                examine(replace(skill, held_out=skill.train[-validation:]), base),
            )
            for name, skill in skills.items()
        },
        base,
    )
