"""LoRA fine-tunes of SmolLM2-135M-Instruct and held-out questions of their skills, by log-likelihood.

The base is dequantised from 4-bit (see `benchmarks.zoo.language`); the skills are those of
`benchmarks.zoo.language_skills`. Right is the option of the highest log-likelihood after the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from benchmarks.evolve_answers import METHOD, Setting
from benchmarks.zoo.cards import read_card
from benchmarks.zoo.language import Schedule, load_base, save_base, score_base, skill_directory, train
from benchmarks.zoo.language_skills import FEW, Skill, load_skill
from merganser.evaluate.examiners import MultipleChoice, embeddings
from merganser.evolve.fitness import LiveMerge

#: Strengths of single adapters that calibrate the IRT besides the experts themselves.
STRENGTHS = (0.5,)


@dataclass(frozen=True)
class QuestionExam:
    """The experts of a setting, and an examiner for each one's skill with as many questions as the setting says."""

    setting: Setting
    cache: Path
    examiners: Mapping[str, MultipleChoice]

    @property
    def strata(self) -> tuple[str, ...]:
        return tuple(name for name, examiner in self.examiners.items() for _ in range(len(examiner)))

    def asked(self, model: nn.Module, items: Sequence[int]) -> np.ndarray:
        answers = np.empty(len(items))
        for number, examiner in enumerate(self.examiners.values()):
            places = [p for p, item in enumerate(items) if item // self.setting.items == number]
            answers[places] = examiner(model, [items[p] % self.setting.items for p in places])["score"]
        return answers

    def answers(self, model: nn.Module) -> np.ndarray:
        return self.asked(model, range(len(self.strata)))

    def features(self, model: nn.Module) -> np.ndarray:
        return np.concatenate([embeddings(model, each, range(len(each))).numpy() for each in self.examiners.values()])

    def live(self) -> LiveMerge:
        base = save_base(self.cache)
        template = {
            "method": METHOD,
            "base": str(base),
            "models": [{"path": f"{base}+{skill_directory(self.cache, name)}"} for name in self.setting.experts],
        }
        model, _ = load_base(self.cache)
        return LiveMerge(model.eval(), template, self.setting.space)

    def others(self) -> Iterator[tuple[str, nn.Module]]:
        """The base, every expert, and every expert's adapter at other strengths."""
        live = self.live()
        yield "base", live.load(self.setting.point([0.0] * len(self.setting.experts)))
        for place, name in enumerate(self.setting.experts):
            yield name, live.load(name)
            for strength in STRENGTHS:
                weights = [strength if place == other else 0.0 for other in range(len(self.setting.experts))]
                yield f"{name} × {strength}", live.load(self.setting.point(weights))


def load_questions(setting: Setting, cache: Path, data: Path) -> QuestionExam:
    """The items; experts that the zoo lacks are trained."""
    skills = {name: load_skill(name, data) for name in FEW}
    for name in setting.experts:
        train(skills[name], list(skills.values()), 0, Schedule(), cache)
    tokenizer = str(save_base(cache))
    examiners = {
        name: MultipleChoice(records(skills[name])[: setting.items], tokenizer, prompt="{question}", normalize=False)
        for name in setting.experts
    }
    return QuestionExam(setting, cache, examiners)


def records(skill: Skill) -> list[dict[str, Any]]:
    """The held-out examples of a skill as an examiner asks them."""
    return [
        {"question": example.prompt, "options": list(example.options), "answer": example.answer}
        for example in skill.held_out
    ]


def fine_tuning(setting: Setting, cache: Path, data: Path) -> dict[str, Any]:
    """What the cards of the zoo say: scores of the base, before, and of every expert, after, on every skill."""
    base = read_card(save_base(cache)) or score_base([load_skill(name, data) for name in FEW], cache)
    cards = {name: read_card(skill_directory(cache, name)) for name in setting.experts}
    made = {name: card for name, card in cards.items() if card}
    return {
        "base": base.model,
        "scored": base.data["scored"],
        "training": {name: {"examples": card.data["examples"], **card.training} for name, card in made.items()},
        "scores": {name: card.scores for name, card in {"base": base, **made}.items()},
    }
