"""No item that a winner is judged by was seen in its search: not by another seed's, not in another task."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_designs import design
from synthetic_world import World

from merganser.errors import InputError, MerganserError
from merganser.evolve import loading
from merganser.evolve.holdout import Grouped, group_connected, hold_out
from merganser.evolve.preparation import split
from merganser.evolve.study import Study
from merganser.evolve.tasks import StudyTask

pytest.importorskip("pymoo")


def test_searches_of_other_seeds_keep_the_same_test_items(tmp_path):
    tested = []
    for seed in (0, 1):
        study = Study.open(tmp_path / f"{seed}.sqlite")
        study.run(design(seed=seed, generations=1, population=5), World())
        tested.append(study.prepared()["quiz"].split.test.tolist())
        study.close()
    assert tested[0] == tested[1]
    other = design(split_seed=1)
    assert split("quiz", other.tasks["quiz"], other.search.split_seed).test.tolist() != tested[0]


groups = st.lists(st.integers(0, 12).map(str), min_size=2, max_size=40)


@given(st.lists(groups, min_size=1, max_size=4), st.integers(0, 99))
def test_a_group_is_on_one_side_in_all_tasks(columns, seed):
    tasks = {str(n): Grouped(tuple(column), 0.3) for n, column in enumerate(columns)}
    try:
        held = hold_out(tasks, seed)
    except InputError:
        return
    test = {tasks[name].groups[item] for name, items in held.items() for item in items}
    rest = {g for name, task in tasks.items() for i, g in enumerate(task.groups) if i not in set(held[name])}
    assert not test & rest
    assert all(0 < len(items) < len(tasks[name].groups) for name, items in held.items())


def test_test_files_decide_for_other_tasks_too():
    names = tuple(f"q{i}" for i in range(50))
    held = hold_out({"en": Grouped(names, 0.2, own_test=10), "fr": Grouped(names[::-1], 0.2)}, 0)
    assert held == {"en": tuple(range(40, 50)), "fr": tuple(range(10))}
    with pytest.raises(InputError, match="group 'q0' is in a test file and among"):
        hold_out({"en": Grouped((*names, "q0"), 0.2, own_test=1)}, 0)
    with pytest.raises(InputError, match="the same share"):
        hold_out({"en": Grouped(names, 0.2), "fr": Grouped(names, 0.3)}, 0)


def test_tasks_that_share_groups_through_others_are_found():
    found = group_connected({"a": "xy", "b": "z", "c": "yz", "d": "w"})
    assert sorted(map(sorted, found)) == [["a", "b", "c"], ["d"]]


QUIZ = "quiz: {kind: multiple-choice, data: ./quiz.jsonl, subset: 8, estimator: gmp-irt, c: adaptive}"


@pytest.fixture
def languages(llamas, tmp_path):
    """The quiz in two "languages" and orders, with numbers, and a further file for the test."""
    lines = [json.loads(line) for line in (llamas / "quiz.jsonl").read_text().splitlines()]
    orders = {"en": range(60), "fr": np.random.default_rng(0).permutation(60)}
    for name, order in orders.items():
        records = [lines[i] | {"number": int(i)} for i in order]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "later.jsonl").write_text("\n".join(map(json.dumps, lines[:7])))
    return tmp_path, {name: list(order) for name, order in orders.items()}


def test_a_question_is_a_test_item_in_all_tasks_or_in_none(languages, run_file):
    root, orders = languages
    tasks = "\n  ".join(
        f"{n}: {{kind: multiple-choice, data: {root}/{n}.jsonl, subset: 8, group: number}}" for n in ("en", "fr")
    )
    loaded = loading.load(run_file((QUIZ, tasks), ("objectives: [quiz]", "objectives: [en]")))
    test = {n: {orders[n][i] for i in split(n, t, 0).test} for n, t in loaded.design.tasks.items()}
    assert test["en"] == test["fr"]
    assert len(test["en"]) == 12
    other = loading.load(
        run_file((QUIZ, tasks), ("objectives: [quiz]", "objectives: [en]"), ("seed: 1", "split_seed: 1"))
    )
    assert {orders["en"][i] for i in other.design.tasks["en"].test_items} != test["en"]


def test_every_label_has_its_share_of_the_test_items(run_file):
    loaded = loading.load(run_file())
    [task] = loaded.design.tasks.values()
    answers = np.array([record["answer"] for record in loaded.evaluate.examiners["quiz"].records])
    test = np.bincount(answers[list(task.test_items)], minlength=answers.max() + 1)
    assert np.abs(test - 0.2 * np.bincount(answers)).max() <= 1
    assert task.pool == task.items - round(0.2 * task.items)


def test_listed_test_items_are_kept(run_file):
    loaded = loading.load(run_file(("subset: 8,", "subset: 8, test_items: [3, 5],")))
    assert loaded.design.tasks["quiz"].test_items == (3, 5)


def test_one_file_in_two_tasks_is_split_once(run_file):
    twice = f"{QUIZ}\n  again: {{kind: choice, data: ./quiz.jsonl}}"
    first, second = loading.load(run_file((QUIZ, twice))).design.tasks.values()
    assert first.test_items == second.test_items


def test_a_test_file(languages, run_file):
    root, _ = languages
    loaded = loading.load(run_file(("subset: 8,", f"subset: 8, test: {root}/later.jsonl,")))
    [task] = loaded.design.tasks.values()
    assert (task.items, task.pool) == (67, 60)
    assert split("quiz", task, 3).test.tolist() == list(range(60, 67))
    np.save(root / "known.npy", np.ones((3, 60)))
    change = ("subset: 8,", f"subset: 8, test: {root}/later.jsonl, calibration: {root}/known.npy,")
    assert loading.load(run_file(change)).calibration["quiz"].items == 60
    with pytest.raises(MerganserError, match=r"later\.json: cannot be read"):
        loading.load(run_file(("subset: 8,", f"subset: 8, test: {root}/later.json,")))


@pytest.mark.parametrize(
    ("listed", "message"), [((1, 1), "distinct numbers"), ((60,), "below 60"), ((), "cannot be split")]
)
def test_test_items_that_are_none(listed, message):
    with pytest.raises(InputError, match=message):
        StudyTask(60, test_items=listed)
