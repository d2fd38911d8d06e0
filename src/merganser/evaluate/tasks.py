"""Tasks in local files, asked of whole models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from merganser.errors import InputError, did_you_mean
from merganser.evaluate.endpoints import Server
from merganser.evaluate.examiners import KINDS
from merganser.evaluate.harness import HARNESS, Harness
from merganser.evaluate.prompts import Prompted
from merganser.evaluate.questions import SCORE, Examiner
from merganser.evaluate.sampling import order_items

#: By kind of task, what answers it, in words and by kinds of loaders; all others ask a language model.
_ASKED = {
    "classification": ("a sequence classifier", ("sequence-classification",)),
    "perplexity": ("a causal language model", ("causal-lm",)),
}


def check_model_kind(kind: str, of_model: str) -> None:
    """Refuse a kind of model that would answer a kind of task with an error, or with numbers that mean nothing.

    Args:
        kind: The kind of task.
        of_model: The kind of model, as in `language.kind_of_model`.

    Raises:
        InputError: If the model has no logits of classes or of the next token, whichever the task needs.
    """
    what, known = _ASKED.get(kind, ("a language model", ("causal-lm", "seq2seq-lm")))
    if of_model not in known:
        raise InputError(f"kind {kind} asks {what}, not a model of kind {of_model}")


@dataclass(frozen=True)
class Task:
    """Questions in a .jsonl, .json or .tsv file, and how to ask them; or a task of the lm-evaluation-harness.

    Args:
        name: What results call the task.
        kind: The kind of questions, such as `"multiple-choice"`, `"generation"` or `"lm-eval"`.
        path: The file; for `"lm-eval"` the task's name in the harness.
        options: Options of the kind, such as `{"shots": 5}`.

    Example:
        >>> task = mg.evaluate.Task("quiz", "multiple-choice", "quiz.jsonl", {"shots": 2})
    """

    name: str
    kind: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read `kind:file` or `name=kind:file`, as the command line has it; `lm-eval:task` names a task instead."""
        name, equals, rest = text.partition("=")
        kind, colon, path = (rest if equals else text).partition(":")
        if not colon or not path:
            raise InputError(f"{text!r}: expected [name=]kind:file, e.g. quiz=multiple-choice:quiz.jsonl")
        return cls(name if equals else Path(path).stem, kind, path)

    def __post_init__(self) -> None:
        if self.kind not in (kinds := (*KINDS, HARNESS)):
            raise InputError(f"task {self.name!r}: unknown kind {self.kind!r}{did_you_mean(self.kind, kinds)}")

    @property
    def higher_is_better(self) -> bool:
        if self.kind == HARNESS:
            return Harness(self.path, "", **self.options).directions.get(SCORE) != "lower"
        return self.kind != "perplexity"

    def check(self) -> None:
        """Read and check every question, without a model.

        Raises:
            InputError: If the file cannot be read, or a question is invalid; names the line.
        """
        len(self.examiner(""))

    def check_model(self, label: str, kind: str) -> None:
        """Check that a model can answer the questions, before it is loaded.

        Args:
            label: The name of the model in messages.
            kind: The kind of model, as in `language.kind_of_model`.

        Raises:
            InputError: If the model has no logits of classes or of the next token, whichever the task needs.
        """
        try:
            check_model_kind(self.kind, kind)
        except InputError as error:
            raise InputError(
                f"task {self.name!r}: {error}, which {label} is by the architectures of its config.json; to score it "
                "with your own head, use mg.tuning from Python"
            ) from None

    def examiner(self, tokenizer: str) -> Examiner:
        found: Any = (Harness if self.kind == HARNESS else KINDS[self.kind])(self.path, tokenizer, **self.options)
        return cast(Examiner, found)

    def count(self, tokenizer: str) -> int:
        """Return the number of questions."""
        return len(self.examiner(tokenizer))

    def score(self, model: nn.Module | Server, tokenizer: str, limit: int | None = None) -> float:
        """Return the mean score over all questions, or over the first `limit` in the order of `order_items`."""
        answers = self.answers(model, tokenizer, slice(limit))
        return sum(answers) / len(answers)

    def answers(self, model: nn.Module | Server, tokenizer: str, part: slice) -> list[float]:
        """Return the score of each question of a part of them, in the order of `order_items`."""
        examiner: Any = self.examiner(tokenizer)
        if isinstance(model, Server) and not isinstance(examiner, Prompted):
            raise InputError(f"task {self.name!r}: kind {self.kind} needs a model in memory, not one behind a server")
        with torch.inference_mode():
            return [float(value) for value in examiner(model, order_items(examiner)[part])[SCORE]]
