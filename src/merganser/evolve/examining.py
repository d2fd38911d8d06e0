"""The examiners of a run file's tasks, and what the questions say about the tasks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sized
from dataclasses import fields, replace

from merganser.errors import InputError, did_you_mean
from merganser.evaluate.examiners import KINDS, Function
from merganser.evaluate.harness import HARNESS, Harness
from merganser.evaluate.questions import Asked, Examiner
from merganser.evaluate.references import import_function
from merganser.evaluate.sampling import order_items
from merganser.evolve.holdout import Grouped, group_connected, hold_out
from merganser.evolve.measures import name_measure
from merganser.evolve.runfile import SERVER, RunFile
from merganser.evolve.tasks import StudyTask


def build_examiner(entry: StudyTask, run: RunFile) -> Examiner:
    """Return the examiner of a task; every question has been checked."""
    if isinstance(entry.test, str) and entry.kind in ("function", HARNESS):
        raise InputError(
            f"test: {entry.test!r} is a file of questions, which kind {entry.kind} does not read; give a share"
        )
    tokenizer = run.model.tokenizer or (run.model.kind != SERVER and run.model.path) or run.original
    if entry.kind == "function":
        if entry.function is None or not entry.items:
            raise InputError("kind function needs function: package.module:name and items: their number")
        import_function(entry.function)
        return Function(entry.function, entry.items, tokenizer)
    kinds = [*KINDS, HARNESS, "function"]
    if entry.kind not in kinds:
        raise InputError(f"unknown kind {entry.kind!r}{did_you_mean(entry.kind, kinds)}")
    if entry.items:
        raise InputError("items: counted in the data; leave it out")
    examiner = _build_harness(entry, tokenizer) if entry.kind == HARNESS else _list_asked(entry, tokenizer)
    if not len(examiner):
        raise InputError(f"{entry.data or entry.task}: contains no questions")
    return examiner


def complete_task(name: str, task: StudyTask, examiner: Examiner, test_items: tuple[int, ...] | None) -> StudyTask:
    """Return a task with its number of items, their strata, and the direction of its score.

    Args:
        name: The name of the task.
        task: The task as the run file has it.
        examiner: Its questions.
        test_items: The test items, if they are not drawn from this task alone.
    """
    if task.extractor == "representation" and not isinstance(examiner, Asked):
        raise InputError(f"{task.kind} has no texts to embed; choose another extractor")
    strata = task.strata
    return replace(
        task,
        items=len(examiner),
        strata=_read_column(examiner, strata, "stratify by") if isinstance(strata, str) else strata,
        direction=task.direction or directions_of(name, examiner).get(name),  # type: ignore[arg-type]
        test_items=task.test_items if test_items is None else test_items,
    )


def choose_test_items(run: RunFile, examiners: Mapping[str, Examiner]) -> dict[str, tuple[int, ...]]:
    """Return the test items of tasks whose questions are known: those of a test file, groups that tasks share, or a
    share of every label.
    """
    found: dict[str, tuple[int, ...]] = {}
    grouped: dict[str, Grouped] = {}
    for name, examiner in examiners.items():
        entry = run.tasks[name]
        own = _count_own_test(entry, examiner)
        if own:
            found[name] = tuple(range(len(examiner) - own, len(examiner)))
        if (groups := _read_groups(entry, examiner, run)) is not None:
            share = entry.test if not isinstance(entry.test, str) else 0.2
            grouped[name] = Grouped(groups, share, own)
        elif not own and entry.test_items is None and isinstance(examiner, Asked):
            found[name] = draw_test_items(name, examiner, float(entry.test), run.search.split_seed)
    for names in group_connected({name: task.groups for name, task in grouped.items()}):
        found |= hold_out({name: grouped[name] for name in names}, run.search.split_seed)
    return found


def draw_test_items(name: str, examiner: Sized, share: float, seed: int) -> tuple[int, ...]:
    """Draw test items with about the same share of every label as the rest, which a random draw of few items has not.

    Args:
        name: The name of the task, so that tasks draw independently.
        examiner: Its questions.
        share: The share of its items.
        seed: The seed; use the same for every search of a comparison.

    Returns:
        Item numbers, in order.
    """
    count = max(1, round(len(examiner) * share))
    return tuple(sorted(order_items(examiner, [seed, zlib.crc32(name.encode())])[:count]))


def _count_own_test(entry: StudyTask, examiner: Examiner) -> int:
    """Return how many of the last items are from the task's test file."""
    if not isinstance(entry.test, str) or not isinstance(examiner, Asked):
        return 0
    return len(examiner) - len(replace(examiner, test=None))


def _read_groups(entry: StudyTask, examiner: Examiner, run: RunFile) -> tuple[str, ...] | None:
    """Return the group of every item: the field that the task names, a field `group`, or the place in a file that
    several tasks use.
    """
    if entry.group is not None:
        return _read_column(examiner, entry.group, "group by")
    records = getattr(examiner, "records", None)
    if records is not None and all("group" in record for record in records):
        return tuple(str(record["group"]) for record in records)
    if entry.data is not None and sum(each.data == entry.data for each in run.tasks.values()) > 1:
        return tuple(f"{entry.data}#{item}" for item in range(len(examiner)))
    return None


def directions_of(name: str, examiner: Examiner) -> dict[str, str]:
    """Return the directions of a task's measures, by their names in objectives."""
    known: Mapping[str, str] = getattr(examiner, "directions", {})
    return {name_measure(name, measure): direction for measure, direction in known.items()}


def _read_column(examiner: Examiner, field: str, purpose: str) -> tuple[str, ...]:
    """Return a field of every record, as text."""
    records = getattr(examiner, "records", None)
    if records is None:
        raise InputError(f"{field!r} is a field of the data, and a function has none")
    missing = next((i for i, record in enumerate(records) if field not in record), None)
    if missing is not None:
        raise InputError(f"record {missing} has no field {field!r} to {purpose}")
    return tuple(str(record[field]) for record in records)


def _list_asked(entry: StudyTask, tokenizer: str) -> Examiner:
    if entry.data is None:
        raise InputError(f"kind {entry.kind} needs data: a file of questions")
    kind = KINDS[entry.kind]
    _check_options(entry.options, kind, {"source", "tokenizer", "test"})
    test = None if not isinstance(entry.test, str) else entry.test
    return kind(entry.data, tokenizer, test=test, **entry.options)  # type: ignore[return-value]


def _build_harness(entry: StudyTask, tokenizer: str) -> Harness:
    if entry.task is None:
        raise InputError(f"kind {HARNESS} needs task: the name of a task of the harness")
    _check_options(entry.options, Harness, {"task", "tokenizer", "data"})
    return Harness(entry.task, tokenizer, entry.data, **entry.options)


def _check_options(options: Iterable[str], kind: type[Asked | Harness], others: set[str]) -> None:
    known = {field.name for field in fields(kind)} - others
    for option in options:
        if option not in known:
            raise InputError(f"options: unknown {option!r}{did_you_mean(option, known)}")
