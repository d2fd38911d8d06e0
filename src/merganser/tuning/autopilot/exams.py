"""Exams of contenders: ordered questions of several tasks, and a function that asks them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from merganser.errors import InputError, did_you_mean
from merganser.evaluate import language
from merganser.evaluate.questions import SCORE
from merganser.evaluate.records import Records
from merganser.evaluate.sampling import order_by_strata, order_items
from merganser.evaluate.tasks import Task
from merganser.evolve.arrays import Array
from merganser.evolve.objectives import Objective
from merganser.evolve.preparation import Calibration
from merganser.evolve.subsets import kmeans
from merganser.modules.batches import Batch
from merganser.modules.inputs import map_tensors
from merganser.tuning.autopilot.contenders import Contender
from merganser.tuning.autopilot.merges import Merges
from merganser.tuning.autopilot.pseudo_tasks import find_unanswered
from merganser.tuning.sweep import Variant
from merganser.tuning.validation import Validation

ItemsByTask: TypeAlias = Mapping[str, Sequence[int]]
Asker: TypeAlias = Callable[[Variant, ItemsByTask], Mapping[str, Sequence[float]]]
#: The share of a task's questions that is held out for the check, and the minimum number of questions.
UNSEEN, ENOUGH = 1 / 2, 9


@dataclass(frozen=True, eq=False)
class Exam:
    """Questions of several tasks.

    Attributes:
        orders: The items of each task in the order they are asked; every prefix is a sample.
        asker: Asks a variant some items and returns an answer for each.
        name: Identifies the questions in a journal.
        lower: Tasks with lower-is-better scores.
        pseudo: Whether the experts' answers stand in for the right ones, so that a score is an agreement.
    """

    orders: ItemsByTask
    asker: Asker
    name: str
    lower: tuple[str, ...] = ()
    pseudo: bool = False

    def __post_init__(self) -> None:
        for task, order in self.orders.items():
            if len(order) < ENOUGH:
                raise InputError(
                    f"task {task!r}: {len(order)} questions are too few to split between choosing and checking; "
                    f"give {ENOUGH} or more"
                )

    @property
    def objective(self) -> Objective:
        """Return the mean over the tasks, with lower-is-better scores negated."""
        share = 1 / len(self.orders)
        return Objective("mean", {task: -share if task in self.lower else share for task in self.orders})

    def parts(self, unseen: bool) -> dict[str, Sequence[int]]:
        """Return the items that a race may use, or those that it must not."""
        cuts = {task: len(order) - int(len(order) * UNSEEN) for task, order in self.orders.items()}
        return {task: order[cuts[task] :] if unseen else order[: cuts[task]] for task, order in self.orders.items()}

    def ask(self, variant: Variant, items: ItemsByTask) -> dict[str, list[float]]:
        """Return the answers of a variant, one for each item.

        Raises:
            InputError: If the asker does not return one answer per item.
        """
        found = self.asker(variant, items)
        answers = {}
        for task, chosen in items.items():
            values = [float(value) for value in found.get(task, ())]
            if len(values) != len(chosen):
                raise InputError(f"task {task!r}: {len(values)} answers to {len(chosen)} items; expected one per item")
            answers[task] = values
        return answers


def exam_of_tasks(tasks: Sequence[Task], merges: Merges, device: str, calibrations: Mapping[str, Calibration]) -> Exam:
    """Return an exam of task files, asked of a live module of the base's architecture.

    If no task has answers, those of the experts of the same names stand in.
    """
    base, seed = merges.base, merges.seed
    directory = base.directory
    kind = language.kind_of_model(directory)
    if directory is None or kind is None:
        raise InputError(
            f"{base.label}: tasks need models that transformers can load; for others, give mg.tuning.auto data or a "
            "score from Python"
        )
    for task in tasks:
        task.check_model(base.label, kind)
    if twice := [task.name for task in tasks if sum(task.name == other.name for other in tasks) > 1]:
        raise InputError(f"two tasks are called {twice[0]!r}; give them different names")
    unanswered = find_unanswered(tasks, list(merges.experts))
    module = language.load(Path(directory), kind, device).module

    def examiner(task: Task) -> Any:
        if task.name not in unanswered:
            return task.examiner(str(directory))
        expert = merges.exact(Contender(task.name)).into(module).eval()
        return unanswered[task.name].answered(expert, str(directory))

    examiners = {task.name: examiner(task) for task in tasks}
    orders = _orders({name: len(examiner) for name, examiner in examiners.items()}, seed, calibrations)
    orders |= {name: order_items(examiner, seed) for name, examiner in examiners.items() if name not in calibrations}

    def ask(variant: Variant, items: ItemsByTask) -> dict[str, Sequence[float]]:
        model = variant.into(module).eval()
        with torch.inference_mode():
            return {task: examiners[task](model, chosen)[SCORE] for task, chosen in items.items()}

    return Exam(
        orders,
        ask,
        " ".join(f"{task.name}={task.kind}:{_digest(_contents(examiners[task.name].records))}" for task in tasks),
        tuple(task.name for task in tasks if not task.higher_is_better),
        bool(unanswered),
    )


def exam_of_batches(
    validation: Validation, seed: int, calibrations: Mapping[str, Calibration], pseudo: bool = False
) -> Exam:
    """Return an exam of labelled batches, with each sample a question; `pseudo` if the experts labelled them."""
    counts = validation.counts()
    return Exam(
        _orders(counts, seed, calibrations),
        lambda variant, items: validation.answers(variant.weights(), items),
        f"samples {counts} {_digest([[_contents_of(batch) for batch in own] for own in validation.batches.values()])}",
        pseudo=pseudo,
    )


def exam_of_score(
    score: Callable[..., Any], items: int | Mapping[str, int], seed: int, calibrations: Mapping[str, Calibration]
) -> Exam:
    """Return an exam from a function of (weights, items); with a single number of items, for one task."""
    counts = {"score": items} if isinstance(items, int) else dict(items)

    def ask(variant: Variant, chosen: ItemsByTask) -> Mapping[str, Sequence[float]]:
        if isinstance(items, int):
            return {"score": score(variant.weights(), list(chosen["score"]))}
        found = score(variant.weights(), {task: list(own) for task, own in chosen.items()})
        if not isinstance(found, Mapping):
            raise InputError(
                f"the score of tasks {list(counts)} returned a {type(found).__name__}, not answers by task"
            )
        return found

    return Exam(_orders(counts, seed, calibrations), ask, f"a score {counts}")


def _contents_of(batch: Batch) -> Any:
    """Return the identity of a batch: digests of its tensors, and everything else as it is."""
    inputs, targets = map_tensors(batch[0], _digest_of_tensor), _digest_of_tensor(batch[1])
    return [dict(inputs) if isinstance(inputs, Mapping) else inputs, targets]


def _digest_of_tensor(tensor: Tensor) -> str:
    stored = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(stored).hexdigest()[:16]}"


def _contents(records: Records) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "place"} for record in records]


def _digest(questions: Any) -> str:
    """Return the identity of questions in a journal: their content, independent of where it is stored."""
    return hashlib.sha256(json.dumps(questions, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _orders(counts: Mapping[str, int], seed: int, calibrations: Mapping[str, Calibration]) -> dict[str, list[int]]:
    if unknown := next((name for name in calibrations if name not in counts), None):
        raise InputError(f"calibration: no task {unknown!r}{did_you_mean(unknown, counts)}")
    return {
        name: _informed_order(calibrations[name], count, name, seed)
        if name in calibrations
        else order_by_strata([None] * count, seed)
        for name, count in counts.items()
    }


def _informed_order(known: Calibration, count: int, task: str, seed: int) -> list[int]:
    """Return an order in which every prefix has items of each kind that an IRT distinguishes, in proportion.

    Items are clustered by discrimination and difficulty, and the clusters are the strata.
    """
    if known.items != count:
        raise InputError(f"task {task!r}: the calibration covers {known.items} items, but the task has {count}")
    if known.irt is not None:
        points: Array = known.irt.items.embedding
    else:
        from merganser.evolve.irt.fitting import fit

        assert known.answers is not None
        points = fit(known.answers, dimensions=min(2, len(np.atleast_2d(known.answers))), seed=seed).items.embedding
    labels, _ = kmeans(points, min(16, max(1, count // 4)), seed=seed)
    return order_by_strata(labels.tolist(), seed)
