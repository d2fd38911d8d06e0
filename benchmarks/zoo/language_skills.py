"""Three skills for a small language model: data, prompts and scores.

- `arithmetic`: word problems solved step by step (GSM8K); besides the likelihood, exact answers on ASDiv;
- `letters`: multiple choice answered with the bare letter (CommonsenseQA, OpenBookQA); besides the likelihood,
  how often the answer is a letter at all and how often the right one;
- `reviews`: one-line film reviews of a given sentiment (MR); likelihood only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.zoo.cards import data_file
from merganser.errors import InputError, did_you_mean

SKILLS = ("arithmetic", "letters", "reviews")
MAX_TOKENS = 192


@dataclass(frozen=True)
class Example:
    """A prompt, the completion to learn, and the answer that counts as right (None: likelihood only)."""

    prompt: str
    completion: str
    answer: str | None = None


@dataclass(frozen=True)
class Skill:
    """Training examples, held-out examples for the likelihood, and problems to answer by generation."""

    name: str
    train: list[Example]
    held_out: list[Example]
    problems: list[Example]


def load_skill(name: str, data: Path) -> Skill:
    """A skill with a fixed shuffle and split."""
    if name not in SKILLS:
        raise InputError(f"unknown skill {name!r}{did_you_mean(name, SKILLS)}")
    if name == "arithmetic":
        train, test = (
            [_solution(row) for row in _json_lines(data, f"gsm8k_{part}.jsonl")] for part in ("train", "test")
        )
        asdiv = [_short_problem(row) for row in _json_lines(data, "qa/asdiv.jsonl") if re.match(r"\d", row["answer"])]
        return Skill(name, _shuffled(train), _shuffled(test), _shuffled(asdiv))
    if name == "letters":
        rows = [row for file in ("commonsenseqa", "openbookqa") for row in _json_lines(data, f"qa/{file}.jsonl")]
        examples = _shuffled([_choice(row) for row in rows])
        return Skill(name, examples[400:], examples[:400], examples[:400])
    train, test = (
        [_review(line) for line in data_file(data, f"text/mr.{part}.tsv").read_text(encoding="utf-8").splitlines()]
        for part in ("train", "test")
    )
    return Skill(name, _shuffled(train), _shuffled(test), [])


def _json_lines(data: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data_file(data, name).read_text(encoding="utf-8").splitlines()]


def _shuffled(examples: Sequence[Example]) -> list[Example]:
    return [examples[i] for i in np.random.default_rng(0).permutation(len(examples))]


def _solution(row: dict[str, Any]) -> Example:
    steps = re.sub(r"<<.*?>>", "", row["answer"])
    return Example(f"Question: {row['question']}\nAnswer:", f" {steps}")


def _short_problem(row: dict[str, Any]) -> Example:
    answer = re.match(r"[\d.,]*\d", row["answer"])
    assert answer is not None  # load_skill keeps answers that start with a digit
    return Example(f"Question: {row['question']}\nAnswer:", f" {row['answer']}", answer[0].replace(",", ""))


def _choice(row: dict[str, Any]) -> Example:
    letters = "ABCDEFGH"
    options = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, row["options"], strict=False))
    letter = letters[row["answer"]]
    return Example(f"Question: {row['question']}\n{options}\nAnswer:", f" {letter}", letter)


def _review(line: str) -> Example:
    label, sentence = line.split("\t", 1)
    return Example(f"A {'good' if label == '1' else 'bad'} film review:", f" {sentence}")


def collate(tokeniser: Any, examples: Sequence[Example]) -> dict[str, Tensor]:
    """Right-padded `input_ids`, `attention_mask` and `labels`, where only the completion and the end count."""
    rows, prompts = [], []
    for example in examples:
        prompt = tokeniser(example.prompt)["input_ids"]
        completion = tokeniser(example.completion)["input_ids"]
        rows.append(torch.tensor([*prompt, *completion, tokeniser.eos_token_id][:MAX_TOKENS]))
        prompts.append(len(prompt))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokeniser.eos_token_id)
    lengths = torch.tensor([len(row) for row in rows])
    position = torch.arange(ids.shape[1])
    mask = position < lengths[:, None]
    counted = mask & (position >= torch.tensor(prompts)[:, None])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(counted, ids, -100)}


def completion_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Summed cross-entropy of the completions' tokens and their number."""
    hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    counted = labels != -100
    return F.cross_entropy(hidden[counted].float(), labels[counted], reduction="sum"), int(counted.sum())


@torch.no_grad()
def likelihood(model: Any, tokeniser: Any, examples: Sequence[Example], batch: int = 8) -> float:
    """Mean negative log-likelihood of a completion token, in nats."""
    model.eval()
    order = sorted(examples, key=lambda example: len(example.prompt) + len(example.completion))
    parts = [completion_loss(model, collate(tokeniser, order[i : i + batch])) for i in range(0, len(order), batch)]
    return float(sum(loss.item() for loss, _ in parts)) / sum(count for _, count in parts)


@torch.no_grad()
def generate(model: Any, tokeniser: Any, prompts: Sequence[str], tokens: int) -> list[str]:
    """Greedy completions of at most `tokens` tokens."""
    model.eval()
    tokeniser.padding_side, tokeniser.pad_token = "left", tokeniser.eos_token
    batch = tokeniser(list(prompts), return_tensors="pt", padding=True)
    written = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=tokeniser.eos_token_id,
    )
    return [
        str(text)
        for text in tokeniser.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    ]


def final_number(text: str) -> str | None:
    """The number after `####`, else the last number written before the model starts a question of its own."""
    text = text.split("Question:")[0].replace(",", "")
    marked = re.search(r"####\s*\$?(-?\d+(?:\.\d+)?)", text)
    numbers = [marked[1]] if marked else re.findall(r"-?\d+(?:\.\d+)?", text)
    return numbers[-1] if numbers else None


def score(model: Any, tokeniser: Any, skill: Skill, limit: int = 32) -> dict[str, float]:
    """The skill's scores on its first `limit` held-out examples and problems."""
    scores = {f"{skill.name}_nll": likelihood(model, tokeniser, skill.held_out[:limit])}
    problems = skill.problems[:limit]
    prompts = [problem.prompt for problem in problems]
    if skill.name == "arithmetic":
        answers = [final_number(text) for text in generate(model, tokeniser, prompts, tokens=64)]
        right = [a is not None and float(a) == float(p.answer or "nan") for a, p in zip(answers, problems, strict=True)]
        scores["arithmetic_asdiv_exact"] = sum(right) / len(right)
    elif skill.name == "letters":
        letters = [text.strip() for text in generate(model, tokeniser, prompts, tokens=4)]
        scores["letters_format"] = sum(re.fullmatch("[A-H]", text) is not None for text in letters) / len(letters)
        right = [text == problem.answer for text, problem in zip(letters, problems, strict=True)]
        scores["letters_exact"] = sum(right) / len(right)
    return scores
