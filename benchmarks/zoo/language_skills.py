"""Skills that a small language model lacks and can learn: each answers with one of a few words.

- `questions`: what kind of answer a question asks for (TREC, six kinds);
- `sources`: whether a sentence is from a film's review or from its plot (SUBJ);
- `intents`: which of ten domains a request to an assistant belongs to (CLINC150);
- `sentiment`: whether a film's review is negative or positive (SST-2);
- `banking`: which of four themes a question to a bank is about (BANKING77).

Every option is one token, so that the likeliest option is read off the logits after the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.zoo.text_groups import CLINC150_DOMAINS, GROUPS
from benchmarks.zoo.text_tasks import read_rows
from merganser.errors import InputError, did_you_mean

WORDS = {
    "banking": "banking",
    "cards": "credit",
    "commute": "car",
    "home": "home",
    "kitchen": "food",
    "meta": "settings",
    "smalltalk": "chat",
    "travel": "travel",
    "utility": "tools",
    "work": "work",
}
BANKING77_THEMES = {"cards": "card", "payments": "payment", "transfers": "transfer", "accounts": "account"}
HELD_OUT = 300


@dataclass(frozen=True)
class Kind:
    """A skill's file, the prompt around its sentences, its options, and the option that each label means."""

    file: str
    prompt: str
    options: tuple[str, ...]
    meaning: tuple[int, ...]


def _groups(file: str, names: Iterable[str]) -> tuple[int, ...]:
    """The group of each label of a file, as a place in `names`."""
    place = {label: i for i, name in enumerate(names) for label in GROUPS[f"{file}-{name}"][1]}
    return tuple(place[label] for label in range(len(place)))


SKILLS: dict[str, Kind] = {
    "questions": Kind(
        "trec",
        "{sentence}\nThe answer is a",
        ("description", "thing", "abbreviation", "person", "place", "number"),
        tuple(range(6)),
    ),
    "sources": Kind("subj", "{sentence}\nThis is from a film's", ("review", "plot"), (0, 1)),
    "intents": Kind(
        "clinc150",
        "{sentence}\nDomain:",
        tuple(WORDS[domain] for domain in CLINC150_DOMAINS),
        _groups("clinc150", CLINC150_DOMAINS),
    ),
    "sentiment": Kind("sst2", "{sentence}\nThis review is", ("negative", "positive"), (0, 1)),
    "banking": Kind(
        "banking77",
        "{sentence}\nThis is about a",
        tuple(BANKING77_THEMES.values()),
        _groups("banking77", BANKING77_THEMES),
    ),
}
#: The first three, which benchmarks of small searches take.
FEW = ("questions", "sources", "intents")


@dataclass(frozen=True)
class Example:
    """A prompt, the options, and the index of the right one."""

    prompt: str
    options: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Skill:
    """Training examples, and held-out ones of the test file."""

    name: str
    train: list[Example]
    held_out: list[Example]


def load_skill(name: str, data: Path) -> Skill:
    """A skill with a fixed shuffle; training sentences that the test file has too are dropped."""
    if name not in SKILLS:
        raise InputError(f"unknown skill {name!r}{did_you_mean(name, SKILLS)}")
    kind = SKILLS[name]
    test = [(label, sentence.strip()) for label, sentence in read_rows(data, kind.file, "test")]
    known = {sentence for _, sentence in test}
    train = [(label, sentence.strip()) for label, sentence in read_rows(data, kind.file, "train")]
    return Skill(
        name,
        _examples(kind, [row for row in train if row[1] not in known]),
        _examples(kind, test)[:HELD_OUT],
    )


def _examples(kind: Kind, rows: Sequence[tuple[int, str]]) -> list[Example]:
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    return [Example(kind.prompt.format(sentence=rows[i][1]), kind.options, kind.meaning[rows[i][0]]) for i in order]


def option_tokens(tokeniser: Any, options: Sequence[str]) -> Tensor:
    """The token of each option after a space."""
    tokens = [tokeniser(f" {option}", add_special_tokens=False)["input_ids"] for option in options]
    if any(len(each) != 1 for each in tokens):
        raise InputError(f"every option must be one token, and of {list(options)} some are more")
    return torch.tensor([each[0] for each in tokens])


def answer_logits(model: Any, tokeniser: Any, prompts: Sequence[str]) -> Tensor:
    """Logits of the token after each prompt, N×vocabulary."""
    rows = [torch.tensor(tokeniser(prompt)["input_ids"]).flip(0) for prompt in prompts]
    # Padded on the left, by padding what is reversed on the right.
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokeniser.eos_token_id).flip(1)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]
    logits: Tensor = model(input_ids=ids, attention_mask=mask.long(), logits_to_keep=1).logits[:, -1]
    return logits


@torch.no_grad()
def score(model: Any, tokeniser: Any, skill: Skill, batch: int = 25) -> dict[str, float]:
    """Share of the held-out examples whose right option is the likeliest."""
    model.eval()
    examples = sorted(skill.held_out, key=lambda example: len(example.prompt))
    right = 0
    for start in range(0, len(examples), batch):
        part = examples[start : start + batch]
        logits = answer_logits(model, tokeniser, [example.prompt for example in part])
        for row, example in zip(logits, part, strict=True):
            right += int(row[option_tokens(tokeniser, example.options)].argmax() == example.answer)
    return {f"{skill.name}_right": right / len(examples)}
