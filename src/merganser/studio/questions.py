"""Files of questions that the mixer and the comparison ask: a score with its interval, and a paired verdict on two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.errors import InputError, one_of
from merganser.lazy import np
from merganser.strict_json import parse_json

if TYPE_CHECKING:
    from torch import nn

    from merganser.evaluate.questions import Examiner
    from merganser.evolve.intervals import Interval

#: Questions asked between two looks at whether somebody wants something else.
STEP = 8
#: Kinds of questions that a model in memory answers, by the fields that tell them apart, the most telling first.
KINDS = {
    "multiple-choice": {"question", "options", "answer"},
    "exact-match": {"question", "answer"},
    "classification": {"text", "label"},
    "perplexity": {"text"},
}
_LINE_LIMIT = 1 << 20


def guess_kind(path: Path) -> str | None:
    """Return the kind of questions in a JSON-lines file by the fields of its first record; None if it holds others."""
    try:
        with path.open(encoding="utf-8") as file:
            record = parse_json(file.readline(_LINE_LIMIT))
    except (OSError, ValueError):
        return None
    fields = set(record) if isinstance(record, dict) else set()
    return next((kind for kind, needed in KINDS.items() if needed <= fields), None)


@dataclass(frozen=True)
class Quiz:
    """Questions in their order, with the tokenizer of the model that answers them."""

    kind: str
    mark: str
    examiner: Examiner
    items: Sequence[int]

    def parts(self) -> list[Sequence[int]]:
        """Return the questions a few at a time."""
        return [self.items[start : start + STEP] for start in range(0, len(self.items), STEP)]

    def ask(self, module: nn.Module, items: Sequence[int]) -> list[float]:
        """Return the answers of a model to some of the questions."""
        import torch

        with torch.inference_mode():
            found = self.examiner(module, items)
        return [float(value) for value in found["score"]]

    def describe(self, answers: Sequence[float]) -> dict[str, Any]:
        """Return the score so far with its interval; two scores of the same `mark` are of the same questions."""
        from merganser.evolve.intervals import score_interval

        return {
            **_show(score_interval(np.array(answers))),
            "answers": list(answers),
            "count": len(answers),
            "total": len(self.items),
            "kind": self.kind,
            "lower_is_better": self.kind == "perplexity",
            "mark": self.mark,
        }


@dataclass(frozen=True)
class Questions:
    """A file of questions to ask, the kind of them, and how many.

    Args:
        path: The file.
        kind: One of `KINDS`; None guesses from the fields.
        limit: The most questions that are asked, a stratified sample of the file.
    """

    path: Path
    kind: str | None = None
    limit: int = 64

    def open(self, tokenizer: Path) -> Quiz:
        """Read and check the questions.

        Raises:
            InputError: If the file cannot be read, or holds no questions that can be asked.
        """
        if not self.path.is_file():
            raise InputError(f"{self.path.name}: no such file of questions")
        kind = self.kind or guess_kind(self.path)
        if kind is None:
            known = "; ".join(f"{name}: {', '.join(sorted(fields))}" for name, fields in KINDS.items())
            raise InputError(f"{self.path.name}: no questions that are known by their fields ({known})")
        one_of("kind of questions", kind, KINDS)
        stat = self.path.stat()
        mark = f"{self.path}|{kind}|{stat.st_mtime_ns}|{stat.st_size}"
        return _open(self.path, kind, self.limit, str(tokenizer), mark)


@lru_cache(maxsize=4)
def _open(path: Path, kind: str, limit: int, tokenizer: str, mark: str) -> Quiz:
    from merganser.evaluate.sampling import order_items
    from merganser.evaluate.tasks import Task

    examiner = Task(path.stem, kind, str(path)).examiner(tokenizer)
    return Quiz(kind, mark, examiner, order_items(examiner)[:limit])


def compare_answers(left: Sequence[float], right: Sequence[float], lower_is_better: bool = False) -> dict[str, Any]:
    """Return by how much `left` is better than `right`, both asked the same questions, with an interval and a verdict.

    Raises:
        InputError: If they did not answer equally many questions.

    Example:
        >>> compare_answers([1.0] * 4, [0.0, 1.0, 1.0, 1.0])["verdict"]
        'cannot tell'
    """
    from merganser.evolve.intervals import paired_interval
    from merganser.evolve.objectives import Objective

    if len(left) != len(right) or not left:
        raise InputError(f"{len(left)} answers beside {len(right)}: both models must be asked the same questions")
    objective = Objective("score", {"score": 1.0}, not lower_is_better)
    found = paired_interval(objective, {"score": np.array(left)}, {"score": np.array(right)})
    return {**_show(found), "verdict": found.verdict, "count": len(left)}


def _show(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}
