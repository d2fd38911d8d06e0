"""Questions without answers: those of the expert of each task stand in for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from merganser.errors import InputError
from merganser.evaluate.examiners import Classification, MultipleChoice
from merganser.evaluate.questions import Examiner
from merganser.evaluate.records import Records, read_records
from merganser.evaluate.tasks import Task

#: Kinds of tasks whose answers a model can give: the examiner, and the field of the answer.
ANSWERED: Mapping[str, tuple[type[Classification] | type[MultipleChoice], str]] = {
    "classification": (Classification, "label"),
    "multiple-choice": (MultipleChoice, "answer"),
}


@dataclass(frozen=True)
class Unanswered:
    """A task without answers, which is called like the expert whose answers stand in.

    Attributes:
        task: The task.
        records: Its questions.
    """

    task: Task
    records: Records

    def answered(self, expert: nn.Module, tokenizer: str) -> Examiner:
        """Return the examiner of the questions with the expert's answers."""
        kind, field = ANSWERED[self.task.kind]
        field_there = self.task.options.get("fields", {}).get(field, field)

        def examiner(answers: Sequence[int]) -> Any:
            records = [{**each, field_there: answer} for each, answer in zip(self.records, answers, strict=True)]
            return kind(records, tokenizer, **self.task.options)

        asked = examiner([0] * len(self.records))
        with torch.inference_mode():
            found: Examiner = examiner(asked.choices(expert, range(len(self.records))))
        return found


def find_unanswered(tasks: Sequence[Task], experts: Sequence[str]) -> dict[str, Unanswered]:
    """Return the tasks whose questions have no answers, by name: all or none.

    Raises:
        InputError: If only some tasks have answers, or one without is not called like an expert.
    """
    found = {task.name: own for task in tasks if (own := _read(task)) is not None}
    if found and len(found) < len(tasks):
        other = next(task.name for task in tasks if task.name not in found)
        raise InputError(
            f"task {next(iter(found))!r} has no answers and {other!r} has: give them for all tasks or none"
        )
    for name in found:
        if name not in experts:
            raise InputError(
                f"task {name!r} has no answers; to let an expert's stand in, call it like that expert: "
                f"{experts[0]}={found[name].task.kind}:{found[name].task.path}"
            )
    return found


def _read(task: Task) -> Unanswered | None:
    """Return a task whose questions all lack an answer; None for others, also if only some lack it."""
    if task.kind not in ANSWERED:
        return None
    kind, field = ANSWERED[task.kind]
    theirs = task.options.get("fields", {})
    placed = read_records(task.path, [theirs.get(name, name) for name in kind.needed if name != field])
    records = [each.record for each in placed]
    return (
        None if any(each.get(theirs.get(field, field)) is not None for each in records) else Unanswered(task, records)
    )
