"""The language zoo's data, prompts and scores, with a character tokenizer and a toy model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo import language_skills as skills
from benchmarks.zoo.language_skills import Example
from merganser.errors import InputError


class Characters:
    """A tokenizer of single characters."""

    eos_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


class Bigrams(nn.Module):
    """Next-character logits that depend on the current character only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(128, 128)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(logits=self.table(input_ids))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "qa").mkdir()
    (tmp_path / "text").mkdir()
    problem = {"question": "2+3?", "answer": "It is 2+3=<<2+3=5>>5.\n#### 5"}
    for part in ("train", "test"):
        (tmp_path / f"gsm8k_{part}.jsonl").write_text(json.dumps(problem) + "\n")
        (tmp_path / "text" / f"mr.{part}.tsv").write_text("1\twarm and wise\n0\tno thrills\n")
    asdiv = [{"question": "Q", "answer": "1,200 apples"}, {"question": "Q", "answer": "Ann"}]
    (tmp_path / "qa" / "asdiv.jsonl").write_text("\n".join(map(json.dumps, asdiv)) + "\n")
    rows = [{"question": f"q{i}", "options": ["x", "y", "z"], "answer": i % 3} for i in range(250)]
    for name in ("commonsenseqa", "openbookqa"):
        (tmp_path / "qa" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return tmp_path


def test_skills_are_built_from_the_files(files: Path) -> None:
    arithmetic = skills.load_skill("arithmetic", files)
    assert arithmetic.train == [Example("Question: 2+3?\nAnswer:", " It is 2+3=5.\n#### 5")]
    assert [problem.answer for problem in arithmetic.problems] == ["1200"]
    letters = skills.load_skill("letters", files)
    assert (len(letters.train), len(letters.held_out)) == (100, 400)
    assert all(example.completion == f" {example.answer}" for example in letters.train)
    assert "A. x\nB. y\nC. z\nAnswer:" in letters.train[0].prompt
    assert Example("A bad film review:", " no thrills") in skills.load_skill("reviews", files).train


def test_unknown_skill_suggests(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="letters"):
        skills.load_skill("letter", tmp_path)


def test_only_the_completion_and_the_end_count() -> None:
    batch = skills.collate(Characters(), [Example("ab", "c"), Example("a", "bcd")])
    assert batch["input_ids"].tolist() == [[97, 98, 99, 0, 0], [97, 98, 99, 100, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, -100, 99, 0, -100], [-100, 98, 99, 100, 0]]


def test_likelihood_is_the_mean_over_completion_tokens() -> None:
    model, examples = Bigrams(), [Example("ab", "c"), Example("a", "bcd"), Example("x", "yy")]
    losses = []
    for example in examples:
        text = [*map(ord, example.prompt + example.completion), 0]
        for position in range(len(example.prompt), len(text)):
            logits = model.table.weight[text[position - 1]]
            losses.append(F.cross_entropy(logits, torch.tensor(text[position])).item())
    expected = sum(losses) / len(losses)
    assert skills.likelihood(model, Characters(), examples, batch=2) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 2+3=5.\n#### 5\nand 7", "5"),
        (" 12 apples", "12"),
        ("First 3, then 1,200.", "1200"),
        ("#### $4.50", "4.50"),
        (" 8\nQuestion: what is 9?", "8"),
        ("none", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert skills.final_number(text) == number


def test_scores_count_letters_and_right_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [Example("q", " A", "A"), Example("q", " B", "B"), Example("q", " C", "C"), Example("q", " A", "A")]
    monkeypatch.setattr(skills, "generate", lambda *_, **__: [" A", "C ", "The", ""])
    skill = skills.Skill("letters", [], examples, examples)
    scores = skills.score(Bigrams(), Characters(), skill)
    assert scores["letters_format"] == 0.5
    assert scores["letters_exact"] == 0.25
