"""LoRA fine-tunes of SmolLM2-135M-Instruct and short multiple-choice questions of their skills, by log-likelihood.

The base is dequantised from 4-bit (see `benchmarks.zoo.language`). Right is the option of the highest log-likelihood
after the prompt. A few dozen steps teach a small model a way of answering, little else, so that is what two of the
skills are asked:

- `arithmetic`: problems of ASDiv; wrong are numbers of the problem and neighbours of the result;
- `letters`: questions of CommonsenseQA and OpenBookQA that were not trained on, with two lettered options; right is the
  bare letter of the right one, wrong the other letter, and the right letter followed by its option;
- `reviews`: a film review as the data set writes it (lower case, spaced punctuation), or as anyone else would.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from benchmarks.evolve_answers import METHOD, Setting
from benchmarks.zoo.cards import data_file, read_card
from benchmarks.zoo.language import Schedule, load_base, save_base, score_base, skill_directory, train
from benchmarks.zoo.language_skills import SKILLS, load_skill
from merganser.evaluate.examiners import MultipleChoice, embeddings
from merganser.evolve.fitness import LiveMerge

Question = dict[str, Any]
LONGEST = 80
LETTERS = "AB"
END = "<|im_end|>"
REVIEW = "A {question} film review:"
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
        return LiveMerge(model.eval(), template, self.setting.experts, self.setting.space)

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
    skills = {name: load_skill(name, data) for name in SKILLS}
    for name in setting.experts:
        train(skills[name], list(skills.values()), 0, Schedule(), cache)
    tokenizer = str(save_base(cache))
    examiners = {}
    for name in setting.experts:
        questions = BUILDERS[name](data)
        order = np.random.default_rng(0).permutation(len(questions))
        chosen = [questions[i] for i in order[: setting.items]]
        prompt = REVIEW if name == "reviews" else MultipleChoice.prompt
        examiners[name] = MultipleChoice(chosen, tokenizer, prompt=prompt, normalize=False)
    return QuestionExam(setting, cache, examiners)


def fine_tuning(setting: Setting, cache: Path, data: Path) -> dict[str, Any]:
    """What the cards of the zoo say: scores of the base, before, and of every expert, after, on every skill."""
    base = read_card(save_base(cache)) or score_base([load_skill(name, data) for name in SKILLS], Schedule(), cache)
    cards = {name: read_card(skill_directory(cache, name)) for name in setting.experts}
    made = {name: card for name, card in cards.items() if card}
    return {
        "base": base.model,
        "scored": base.data["scored"],
        "training": {name: {"examples": card.data["examples"], **card.training} for name, card in made.items()},
        "scores": {name: card.scores for name, card in {"base": base, **made}.items()},
    }


def arithmetic(data: Path) -> list[Question]:
    found: list[Question] = []
    for row in _rows(data, "asdiv"):
        result = re.match(r"\d+(?![\d.,])", row["answer"])
        if result and len(row["question"]) <= LONGEST:
            right = int(result[0])
            numbers = [int(number) for number in re.findall(r"\d+", row["question"])]
            wrong = [n for n in dict.fromkeys([*numbers, right + 1, right + 2]) if n != right][:2]
            found.append(_shuffled(row["question"], [str(n) for n in (right, *wrong)], len(found)))
    return found


def letters(data: Path) -> list[Question]:
    rows = [row for file in ("commonsenseqa", "openbookqa") for row in _rows(data, file)]
    # The same permutation that keeps the skill's first 400 examples out of its training.
    held_out = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:400]]
    found: list[Question] = []
    for row in held_out:
        if len(row["question"]) <= LONGEST:
            right = row["options"][row["answer"]]
            wrong = next(option for option in row["options"] if option != right)
            each = _shuffled(row["question"], [right, wrong], len(found))
            listed = [f"{letter}. {option}" for letter, option in zip(LETTERS, each["options"], strict=True)]
            options = [*LETTERS, listed[each["answer"]]]
            question = "\n".join([row["question"], *listed])
            found.append({**each, "question": question, "options": [f"{option}{END}" for option in options]})
    return found


def reviews(data: Path) -> list[Question]:
    lines = data_file(data, "text/mr.test.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t", 1) for line in lines]
    return [
        _shuffled("good" if label == "1" else "bad", [text, _usual(text)], i)
        for i, (label, text) in enumerate(rows)
        if len(text) <= LONGEST and _usual(text) != text
    ]


def _usual(text: str) -> str:
    """A sentence with a capital, and without spaces before its punctuation."""
    closed = re.sub(r" (?=[.,!?;:')]|n't)", "", text)
    return closed[0].upper() + closed[1:]


BUILDERS = {"arithmetic": arithmetic, "letters": letters, "reviews": reviews}


def _rows(data: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data_file(data, f"qa/{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def _shuffled(question: str, options: Sequence[str], seed: int) -> Question:
    """A question whose right option comes first, with its options in any order."""
    order = np.random.default_rng(seed).permutation(len(options)).tolist()
    return {"question": question, "options": [options[i] for i in order], "answer": order.index(0)}
