"""Study files that are damaged, foreign or full: each is named, none surprises."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from synthetic_designs import design

from merganser.errors import CheckpointError, InputError, MerganserError
from merganser.evolve.irt.model import IRT, Items, Normal
from merganser.evolve.preparation import from_bytes
from merganser.evolve.schema import to_document
from merganser.evolve.store import Answers, Store, Trial
from merganser.evolve.study import Study


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "study.sqlite"
    trial = Trial("candidate", "c0", "done", 0, 0, (0.5,), {"weight": 0.5, "n": 2, "b": True, "method": "ties"})
    store = Store(file)
    store.set(design=to_document(design()))
    store.keep("prepared/quiz", b"bytes")
    store.add(trial, {"quiz": Answers(np.array([0, 1]), np.array([0.0, 1.0]))})
    store.close()
    return file


def damage(path, *statements):
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def test_a_closed_study_is_one_file(path):
    with Study.open(path, readonly=True) as study, Study.open(path) as writing:
        writing.store.set(ended=True)
        assert study.ended, "one reads while another writes"
    Store(path).close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with Study.open(path, readonly=True) as study:
        assert study.ended
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_study_of_an_earlier_version_is_refused_and_left_alone(path):
    damage(path, "PRAGMA user_version=2")
    before = path.read_bytes()
    with pytest.raises(InputError, match="has version 2 of the study format, .* start a new study"):
        Study.open(path)
    assert path.read_bytes() == before


def test_trials_come_back_as_they_were(path):
    (trial,) = Store(path, readonly=True).trials()
    assert trial.genome == (0.5,)
    assert {name: (type(value), value) for name, value in trial.values.items()} == {
        "weight": (float, 0.5),
        "n": (int, 2),
        "b": (bool, True),
        "method": (str, "ties"),
    }


@pytest.mark.parametrize(
    ("statement", "read"),
    [
        ("UPDATE trials SET content = json_set(content, '$.genome', 3)", lambda s: s.trials()),
        ("UPDATE trials SET content = json_set(content, '$.genome[0]', 'x')", lambda s: s.trials()),
        ("UPDATE trials SET content = content || '{'", lambda s: s.trials()),
        ("UPDATE trials SET content = json_set(content, '$.objectives', 1)", lambda s: s.trials()),
        ("UPDATE trials SET content = json_set(content, '$.seconds', 'x')", lambda s: s.trials()),
        ("UPDATE trials SET content = CAST(x'ff' AS TEXT)", lambda s: s.trials()),
        ("ALTER TABLE trials RENAME COLUMN content TO c", lambda s: s.trials()),
        ("ALTER TABLE trials RENAME COLUMN seconds TO s", lambda s: s.pace("candidate")),
        ("UPDATE meta SET value = '{'", lambda s: s.get("design")),
        ("INSERT INTO meta VALUES ('costs', '[1]')", lambda s: s.costs()),
        ('INSERT INTO meta VALUES (\'costs\', \'{"test": {"asking": "x"}}\')', lambda s: s.costs()),
        ("UPDATE meta SET value = x'00'", lambda s: s.get("design")),
        ("UPDATE artifacts SET content = 1000000000000", lambda s: s.artifact("prepared/quiz")),
        ("UPDATE answers SET items = x'00'", lambda s: s.answers(s.trials()[0])),
        ("UPDATE answers SET items = x'0000000000000000'", lambda s: s.answers(s.trials()[0])),
        ("UPDATE answers SET content = 3", lambda s: s.answers(s.trials()[0])),
    ],
)
def test_damage_is_named(path, statement, read):
    damage(path, statement)
    store = Store(path, readonly=True)
    with pytest.raises(InputError, match=r"study\.sqlite: damaged"):
        read(store)
    store.close()


def test_a_view_in_place_of_a_table_is_refused(path):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS key, i AS value FROM n"
    damage(path, "DROP TABLE meta", f"CREATE VIEW meta AS {endless}")
    with pytest.raises(InputError, match="not those of a study"):
        Store(path, readonly=True)


def test_overwritten_pages_are_named(path):
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"study\.sqlite"):
        Store(path, readonly=True).trials()


def test_what_cannot_be_written_is_an_error_that_says_how_to_go_on(path):
    store = Store(path, readonly=True)
    with pytest.raises(MerganserError, match="could not be written: .*readonly.*resume"):
        store.set(ended=True)


@pytest.mark.parametrize("wrong", ["[]", "{}", '{"reference_points": null, "space": 3}'])
def test_a_damaged_design_is_named(path, wrong):
    damage(path, f"UPDATE meta SET value = '{wrong}'")
    with pytest.raises(InputError, match=r"study\.sqlite: its design is damaged"):
        _ = Study.open(path, readonly=True).design


def test_a_damaged_task_is_named(path):
    with pytest.raises(InputError, match=r"study\.sqlite: its data of task 'quiz' are damaged"):
        Study.open(path, readonly=True).prepared()
    with pytest.raises(ValueError, match="header"):
        from_bytes(b"\0" * 8)


CHANGES = [
    ({"difficulty": None}, "no array 'difficulty'"),
    ({"prior.mean": np.zeros(3)}, "shape"),
    ({"abilities": np.array(0.0)}, "shape"),
    ({"discrimination": np.full((4, 2), np.nan)}, "finite"),
    ({"difficulty": np.zeros(4, dtype=np.int64)}, "float64"),
    ({"prior.precision": np.zeros(2)}, "positive"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_an_irt_file_is_checked(tmp_path, change, said):
    file = tmp_path / "irt.safetensors"
    IRT(np.zeros((3, 2)), Items(np.ones((4, 2)), np.zeros(4)), Normal(np.zeros(2), np.ones(2))).save(file)
    arrays = {name: array for name, array in {**load_file(file), **change}.items() if array is not None}
    save_file(arrays, file, {"format": "merganser-irt-1", "validation": "{}"})
    with pytest.raises(CheckpointError, match=rf"irt\.safetensors: a damaged IRT file: .*{said}"):
        IRT.load(file)


@pytest.mark.parametrize("validation", ["[]", "{", '{"x": 1}', '{"1": null}', '{"1": [2]}'])
def test_the_losses_of_an_irt_file_are_checked(tmp_path, validation):
    file = tmp_path / "irt.safetensors"
    IRT(np.zeros((3, 2)), Items(np.ones((4, 2)), np.zeros(4)), Normal(np.zeros(2), np.ones(2))).save(file)
    save_file(load_file(file), file, {"format": "merganser-irt-1", "validation": validation})
    with pytest.raises(CheckpointError, match="a damaged IRT file"):
        IRT.load(file)
