"""`mg.tuning.auto`: a decision from experts and a little data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from merganser.checkpoints.hashing import content_hash
from merganser.checkpoints.opening import Reference
from merganser.engine.workers import DEFAULT_MEMORY
from merganser.errors import InputError
from merganser.evaluate.tasks import Task
from merganser.evolve import calibrations as calibration_files
from merganser.evolve.preparation import Calibration
from merganser.tuning.autopilot.answers import AnswerJournal, OnAnswer, Scoreboard
from merganser.tuning.autopilot.budgets import Budget, Meter
from merganser.tuning.autopilot.contenders import Contender, propose, without
from merganser.tuning.autopilot.deciding import decide
from merganser.tuning.autopilot.decisions import Decision
from merganser.tuning.autopilot.defaults import choose_default
from merganser.tuning.autopilot.exams import Exam, exam_of_batches, exam_of_score, exam_of_tasks
from merganser.tuning.autopilot.looking import LEFT_OUT, Remark, look
from merganser.tuning.autopilot.merges import Merges
from merganser.tuning.held_out import Data, Models, TaskHeads, label, score_held_out
from merganser.tuning.pseudo_labels import pseudo_label
from merganser.tuning.validation import Validation


def auto(
    models: Models,
    base: Reference,
    *,
    data: Data | Sequence[Task] | None = None,
    labelled: bool = True,
    heads: TaskHeads | None = None,
    score: Callable[..., Any] | None = None,
    items: int | Mapping[str, int] | None = None,
    methods: Sequence[str] | None = None,
    budget: str | int | None = None,
    questions: int = 200,
    calibration: Mapping[str, Calibration | str] | None = None,
    seed: int = 0,
    journal: str | os.PathLike[str] | None = None,
    memory: int = DEFAULT_MEMORY,
    device: str = "cpu",
    on_answer: OnAnswer = lambda label, asked, total: None,
) -> tuple[dict[str, Tensor], Decision]:
    """Choose how to merge experts, or decide not to.

    Inspects the weights first: duplicates are left out, and experts that seem to be of another base are tried with and
    without. Then races methods and scales on the same few questions, with closer scales for the better methods, and
    checks the winner on questions that the race did not use. A merge is chosen only if it is better there, beyond a 95
    % interval, than the best single model; and a method other than task arithmetic only if it is better than that.
    Without data there is no evidence: the result is the default merge, marked as such.

    Args:
        models: The experts, in a list or by label.
        base: The model they were fine-tuned from.
        data: Labelled batches `(inputs, targets)` for each expert; or tasks, for models that `transformers` loads.
            Tasks without answers are called like the experts whose answers stand in.
        labelled: Whether batches have targets. Without, the answers of the expert of each task stand in, and the
            decision estimates what the merge loses (`decision.loss`).
        heads: For each expert, a function from the module's output to its task's logits.
        score: Instead of `data`: a function of weights and items that returns a number per item, higher is better; for
            several tasks, a function of weights and items by task that returns numbers by task.
        items: The number of items for `score`; by task, if there are several.
        methods: Methods to race; by default those of task vectors that do well in the benchmarks.
        budget: Limit on the race: a number of questions, a time such as `"10m"`, or both, `"5000,10m"`.
        questions: Maximum questions per task for the best contenders.
        calibration: By task, answers of other models or an IRT; questions are then spread over kinds of items.
        seed: The seed of the order of questions and of random methods.
        journal: A file for the answers; repeat the call to continue an interrupted race.
        memory: The bytes of merges to keep during the race.
        device: The torch device for tasks.
        on_answer: Called with a contender, the number of questions just asked, and the total so far.

    Returns:
        The weights to use (of a merge, an expert or the base), and the decision with everything it is based on.

    Raises:
        InputError: If the models do not fit together, the data cannot be asked, or the budget is too small.

    Example:
        >>> data = {"math": batches, "code": batches}
        >>> weights, decision = mg.tuning.auto(experts, base, data=data)
        >>> decision.verdict, decision.kept, decision.score
    """
    merges = Merges(base, label(models), seed, memory)

    def make_exam(known: Mapping[str, Calibration]) -> Exam | None:
        if data is None and score is None and heads is None and items is None:
            return None
        if isinstance(data, Sequence) and data and all(isinstance(task, Task) for task in data) and score is None:
            tasks: Any = data
            return exam_of_tasks(tasks, merges, device, known)
        batches: Any = data
        if not labelled:
            if score is not None:
                raise InputError("labelled=False is for batches; a score needs no labels")
            batches = pseudo_label(models, base, batches, heads=heads)
        found = score_held_out(models, base, batches, score, heads)
        if isinstance(found, Validation) and score is None:
            return exam_of_batches(found, seed, known, not labelled)
        if items is None:
            raise InputError("a score needs items: the number of items to score")
        return exam_of_score(found, items, seed, known)

    decision = pilot(
        merges,
        make_exam,
        methods=methods,
        budget=budget,
        questions=questions,
        calibration=calibration,
        journal=journal,
        on_answer=on_answer,
    )
    kept = Contender(decision.kept)
    document = decision.recipe or merges.document(kept)
    return merges.variant(document).weights(), decision


def pilot(
    merges: Merges,
    exam: Callable[[Mapping[str, Calibration]], Exam | None],
    *,
    methods: Sequence[str] | None = None,
    budget: str | int | None = None,
    questions: int = 200,
    calibration: Mapping[str, Calibration | str] | None = None,
    journal: str | os.PathLike[str] | None = None,
    on_answer: OnAnswer = lambda label, asked, total: None,
    on_look: Callable[[tuple[Remark, ...]], None] = lambda remarks: None,
    on_plan: Callable[[int], None] = lambda total: None,
) -> Decision:
    """Inspect, race and decide; `auto` without the weights."""
    if questions < 1:
        raise InputError(f"questions must be at least 1, got {questions}")
    limits = Budget.parse(budget)
    known = {
        task: calibration_files.read(found) if isinstance(found, str) else found
        for task, found in (calibration or {}).items()
    }
    names = list(merges.experts)
    remarks = look(merges.base, merges.experts)
    experts = without(names, remarks, LEFT_OUT)
    candidates = propose(experts, remarks, methods) if len(experts) > 1 else []
    for candidate in {each.name: each for each in candidates}.values():  # report problems before any work
        notes = merges.exact(candidate).merge.plan.notes
        remarks = (*remarks, *(Remark("note", note) for note in notes if Remark("note", note) not in remarks))
    asked = exam(known)
    on_look(remarks)
    if asked is None or not candidates:
        return choose_default(merges, experts, remarks)
    identity = {
        "models": {name: content_hash(model) for name, model in merges.experts.items()} if journal else {},
        "base": content_hash(merges.base) if journal else "",
        "questions": asked.name,
        "seed": merges.seed,
    }
    place = None if journal is None else Path(journal)
    with AnswerJournal(place, json.dumps(identity), Meter(limits)) as kept:
        board = Scoreboard(asked, merges, kept, on_answer)
        models = [Contender(name) for name in (*names, merges.base_name)]
        return decide(board, models, candidates, remarks, questions, on_plan)
