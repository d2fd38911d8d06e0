"""Answers of contenders: asked once and kept in a journal, so that a race continues after an interruption."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from merganser.errors import MerganserError
from merganser.evolve.arrays import Array
from merganser.tuning.autopilot.budgets import Meter
from merganser.tuning.autopilot.contenders import Contender
from merganser.tuning.autopilot.exams import Exam, ItemsByTask
from merganser.tuning.autopilot.merges import Merges
from merganser.tuning.score_journal import LineJournal

OnAnswer = Callable[[str, int, int], None]
#: Methods that reach the end of a race. The best merge of each is checked, computed by its method at its scale.
FINALISTS = 3


class BudgetSpentError(Exception):
    """The next questions cost more than the remaining budget."""


class AnswerJournal(LineJournal):
    """The answers of a race: of every contender to the first questions of each task, by part of the exam."""

    record, records, work = "an answer", "answers", "race"

    def __init__(self, path: Path | None, scored_by: str, meter: Meter) -> None:
        super().__init__(path, scored_by)
        self.meter = meter
        #: By part of the exam and contender, then by task.
        self.answers: dict[tuple[str, str], dict[str, list[float]]] = {}
        #: Why some contenders have no answers.
        self.failures: dict[str, str] = {}

    def describe_others(self, scored_by: str) -> str:
        return "the answers of another race, with other models, questions or seed"

    def accept(self, record: Mapping[str, Any]) -> None:
        fresh = {str(task): [_number(value) for value in values] for task, values in record["answers"].items()}
        known = self.answers.setdefault((str(record["part"]), str(record["label"])), {})
        for task, values in fresh.items():
            known.setdefault(task, []).extend(values)
        if record.get("error"):
            self.failures[str(record["label"])] = str(record["error"])
        self.meter.add(int(record["asked"]), float(record["seconds"]), float(record["merging"]))

    def add(self, label: str, part: str, answers: Mapping[str, list[float]], **more: object) -> None:
        """Record answers that continue the known ones, how many of them were `asked`, the `seconds` this took, those of
        `merging`, and the `error` if there was one.
        """
        kept = {task: [None if value != value else value for value in values] for task, values in answers.items()}
        record = {"label": label, "part": part, "answers": kept, **more}
        self.append(record)
        self.accept(record)


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


class Scoreboard:
    """Asks contenders, and stores their answers.

    Args:
        exam: The questions.
        merges: Builds the contenders.
        journal: Stores the answers.
        on_answer: Called with the label, the number of questions just asked, and the total so far.
    """

    def __init__(self, exam: Exam, merges: Merges, journal: AnswerJournal, on_answer: OnAnswer) -> None:
        self.exam = exam
        self.merges = merges
        self.journal = journal
        self.objective = exam.objective
        self._seen, self._unseen = exam.parts(unseen=False), exam.parts(unseen=True)
        self._on_answer = on_answer

    @property
    def meter(self) -> Meter:
        return self.journal.meter

    def most(self, unseen: bool) -> int:
        """Return the largest number of questions of a task, in the race or unseen by it."""
        return max(map(len, (self._unseen if unseen else self._seen).values()))

    def cost(self, start: int, end: int, unseen: bool = False) -> int:
        """Return the number of questions from `start` to `end` of each task."""
        return sum(len(items[start:end]) for items in (self._unseen if unseen else self._seen).values())

    def missing(self, contender: Contender, count: int, *, unseen: bool = False) -> int:
        """Return how many of the first `count` questions of each task were not asked yet."""
        return sum(map(len, self._missing(contender, count, unseen).values()))

    def _missing(self, contender: Contender, count: int, unseen: bool) -> dict[str, Sequence[int]]:
        known = self.journal.answers.get((_part(unseen), contender.label), {})
        items = (self._unseen if unseen else self._seen).items()
        found = {task: own[len(known.get(task, ())) : count] for task, own in items}
        return {task: own for task, own in found.items() if len(own)}

    def ask(
        self,
        contender: Contender,
        count: int,
        *,
        unseen: bool = False,
        reserved: int = 0,
        between: Sequence[Contender] = (),
    ) -> dict[str, Array]:
        """Return the answers to the first `count` questions of each task, and ask the unknown ones.

        A merge that cannot be computed or asked, because its numbers overflow, has NaN answers.

        Args:
            contender: The contender.
            count: The number of questions of each task.
            unseen: Whether to ask those that the race does not use.
            reserved: The questions of the budget that must be left.
            between: Contenders that answered some of these questions. Answers that all of them gave are taken over.

        Raises:
            BudgetSpentError: If the budget does not allow these questions and `reserved` more.
        """
        if missing := self._missing(contender, count, unseen):
            fresh = {task: self._agreed(between, task, count, unseen)[-len(own) :] for task, own in missing.items()}
            to_ask = {task: np.array(own)[np.isnan(fresh[task])].tolist() for task, own in missing.items()}
            self._answer(contender, fresh, {task: own for task, own in to_ask.items() if own}, unseen, reserved)
        return {task: own[:count] for task, own in self.answers(contender, unseen=unseen).items()}

    def _answer(
        self, contender: Contender, fresh: dict[str, Array], to_ask: ItemsByTask, unseen: bool, reserved: int
    ) -> None:
        """Fill in the answers that are NaN in `fresh`, and record them all."""
        asked = sum(map(len, to_ask.values()))
        if asked > self.meter.questions_left(reserved, int(contender.is_merge) if unseen else FINALISTS + 1):
            raise BudgetSpentError
        began = merged = time.perf_counter()
        failed = ""
        try:
            if asked:
                # The check uses exactly the weights that would be written, bit for bit.
                variant = self.merges.exact(contender) if unseen else self.merges.quick(contender)
                merged = time.perf_counter()
                for task, values in self.exam.ask(variant, to_ask).items():
                    fresh[task][np.isnan(fresh[task])] = values
        except MerganserError as error:
            if not contender.is_merge:  # models come first: an error here is not caused by merging
                raise
            fresh, failed = {task: np.full(len(own), math.nan) for task, own in fresh.items()}, str(error)
        self.journal.add(
            contender.label,
            _part(unseen),
            {task: own.tolist() for task, own in fresh.items()},
            asked=asked,
            seconds=time.perf_counter() - began,
            merging=merged - began,
            error=failed,
        )
        self._on_answer(contender.label, asked, self.meter.asked)

    def _agreed(self, between: Sequence[Contender], task: str, count: int, unseen: bool) -> Array:
        """Return the answers to the first questions of a task that all of `between` give; NaN where there is none."""
        agreed = np.full(min(count, len((self._unseen if unseen else self._seen)[task])), math.nan)
        known = [self.answers(each, unseen=unseen)[task][:count] for each in between]
        size = min(map(len, known), default=0)
        if size:
            agreed[:size] = np.where(
                np.all([own[:size] == known[0][:size] for own in known], axis=0), known[0][:size], math.nan
            )
        return agreed

    def answers(self, contender: Contender, *, unseen: bool = False) -> dict[str, Array]:
        """Return the answers of a contender so far."""
        known = self.journal.answers.get((_part(unseen), contender.label), {})
        return {task: np.array(known.get(task, ()), dtype=np.float64) for task in self.exam.orders}


def _part(unseen: bool) -> str:
    return "check" if unseen else "race"
