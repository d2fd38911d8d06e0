"""Tasks in local files, asked of whole models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from merganser.errors import InputError, did_you_mean
from merganser.evaluate.examiners import KINDS
from merganser.evaluate.questions import SCORE, Examiner


@dataclass(frozen=True)
class Task:
    """Questions in a .jsonl, .json or .tsv file and how to ask them: the kind of an examiner, and its options."""

    name: str
    kind: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Task:
        """`kind:file` or `name=kind:file`, as the command line has it."""
        name, equals, rest = text.partition("=")
        kind, colon, path = (rest if equals else text).partition(":")
        if not colon or not path:
            raise InputError(f"{text!r}: expected [name=]kind:file, e.g. quiz=multiple-choice:quiz.jsonl")
        return cls(name if equals else Path(path).stem, kind, path)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"task {self.name!r}: unknown kind {self.kind!r}{did_you_mean(self.kind, KINDS)}")

    @property
    def higher_is_better(self) -> bool:
        return self.kind != "perplexity"

    def check(self) -> None:
        """Read and check every question, without a model.

        Raises:
            InputError: The file cannot be read, or a question in it cannot be asked; with the line.
        """
        len(self.examiner(""))

    def examiner(self, tokenizer: str) -> Examiner:
        found: Any = KINDS[self.kind](self.path, tokenizer, **self.options)
        return cast(Examiner, found)

    def count(self, tokenizer: str) -> int:
        """Return how many questions there are."""
        return len(self.examiner(tokenizer))

    def score(self, model: nn.Module, tokenizer: str, limit: int | None = None) -> float:
        """Return the mean score over all questions, or over `limit` of them, drawn as `sampled` draws them."""
        return self.score_items(model, tokenizer, slice(limit))

    def score_items(self, model: nn.Module, tokenizer: str, part: slice) -> float:
        """Return the mean score over a part of the questions, which come in the order of `sampled`."""
        examiner = self.examiner(tokenizer)
        with torch.inference_mode():
            answers = examiner(model, sampled(examiner)[part])[SCORE]
        return sum(answers) / len(answers)


def sampled(examiner: Examiner, seed: int = 0) -> list[int]:
    """Return the items of a task in an order whose every beginning is a sample of them, stratified by their labels.

    The j-th of the m items of a label, in random order, comes at (j + u)/m with one random u a label: after a share of
    the order, about that share of every label has come.

    Args:
        examiner: The task. Its records' `label`, `letter` or `answer` (where it is an index) are the strata.
        seed: Draws the order, the same for every model.

    Returns:
        All item numbers.

    Example:
        >>> from merganser.evaluate.examiners import Function
        >>> sorted(sampled(Function("module:function", 3)))
        [0, 1, 2]
    """
    records = getattr(examiner, "records", None)
    strata: dict[Any, list[int]] = {}
    for item in range(len(examiner)):
        strata.setdefault(None if records is None else _stratum(records[item]), []).append(item)
    generator = np.random.default_rng(seed)
    places: list[tuple[float, int]] = []
    for members in strata.values():
        start = generator.random()
        places += [((j + start) / len(members), int(i)) for j, i in enumerate(generator.permutation(members))]
    return [item for _, item in sorted(places)]


def _stratum(record: Mapping[str, Any]) -> Any:
    answer = record.get("answer")
    return record.get("label", record.get("letter", answer if isinstance(answer, int) else None))
