"""The language zoo's skills and scores, with a word tokenizer and a toy model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import language_skills as skills
from benchmarks.zoo.cards import default_data
from benchmarks.zoo.language_skills import Example
from merganser.errors import InputError


class Words:
    """A tokenizer of words, numbered as they come."""

    eos_token_id = 0

    def __init__(self) -> None:
        self.known: dict[str, int] = {"": 0}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self.known.setdefault(word, len(self.known)) for word in text.split()]}


class LastWord(nn.Module):
    """Next-word logits that depend on the last word only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 50)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int) -> Any:
        assert attention_mask[:, -1].all()
        return SimpleNamespace(logits=self.table(input_ids[:, -logits_to_keep:]))


def test_skills_are_built_from_the_files(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "subj.train.tsv").write_text("0\twarm and wise\n1\tnick meets ann .\n1\tseen before\n")
    (tmp_path / "text" / "subj.test.tsv").write_text("1\tseen before\n")
    skill = skills.load_skill("sources", tmp_path)
    options = ("review", "plot")
    assert sorted(skill.train, key=lambda example: example.answer) == [
        Example("warm and wise\nThis is from a film's", options, 0),
        Example("nick meets ann .\nThis is from a film's", options, 1),
    ]
    assert skill.held_out == [Example("seen before\nThis is from a film's", options, 1)]


def test_unknown_skill_suggests(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="questions"):
        skills.load_skill("question", tmp_path)


def test_every_label_of_clinc150_has_a_domain() -> None:
    kind = skills.SKILLS["intents"]
    assert len(kind.meaning) == 150
    assert sorted(set(kind.meaning)) == list(range(len(kind.options)))
    assert kind.options[kind.meaning[140]] == "tools"  # the weather


@pytest.mark.skipif(not (default_data() / "text/trec.train.tsv").exists(), reason="the data sets are not here")
@pytest.mark.parametrize(("start", "option"), [("Who ", "person"), ("Where ", "place"), ("How many ", "number")])
def test_kinds_of_answers_are_those_that_the_labels_mean(start: str, option: str) -> None:
    examples = [each for each in skills.load_skill("questions", default_data()).train if each.prompt.startswith(start)]
    assert sum(each.options[each.answer] == option for each in examples) > 0.8 * len(examples) > 40


def test_prompts_are_padded_on_the_left() -> None:
    tokeniser, model = Words(), LastWord()
    logits = skills.answer_logits(model, tokeniser, ["a b c", "d"])
    assert torch.equal(logits, model.table(torch.tensor([3, 4])))


def test_score_counts_likeliest_options_that_are_right() -> None:
    tokeniser, model = Words(), LastWord()
    options = ("x", "y", "z")
    tokens = skills.option_tokens(tokeniser, options)
    examples, right = [], 0
    for i in range(7):
        prompt = f"word word{i}"
        best = int(model.table(torch.tensor(tokeniser(prompt)["input_ids"][-1]))[tokens].argmax())
        examples.append(Example(prompt, options, i % 3))
        right += best == i % 3
    scores = skills.score(model, tokeniser, skills.Skill("toy", [], examples), batch=3)
    assert scores == {"toy_right": right / 7}


def test_options_of_several_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="one token"):
        skills.option_tokens(Words(), ["one", "two words"])
