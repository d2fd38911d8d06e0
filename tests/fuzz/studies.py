"""Studies and item response models: valid files, and what reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from merganser.errors import InputError
from merganser.evolve.design import Design, Search
from merganser.evolve.irt.model import IRT, Items, Normal
from merganser.evolve.objectives import Objective
from merganser.evolve.preparation import prepare, to_bytes
from merganser.evolve.schema import to_document
from merganser.evolve.space import SearchParameter
from merganser.evolve.store import Answers, Store, Trial, TrialEstimate
from merganser.evolve.study import Study
from merganser.evolve.tasks import StudyTask
from merganser.strict_json import parse_json


def read_study(directory: Path) -> None:
    store = Store(directory / "study.sqlite", readonly=True)
    try:
        store.get("design")
        for trial in store.trials():
            store.answers(trial)
        store.pace("search")
    finally:
        store.close()


def read_design(directory: Path) -> None:
    """A study whose design and prepared task are what the files say."""
    try:
        design = parse_json((directory / "design.json").read_bytes())
    except ValueError as error:
        raise InputError(str(error)) from None
    with Study.open(directory / "new.sqlite") as study:
        study.store.set(design=design)
        study.store.keep("prepared/quiz", (directory / "prepared").read_bytes())
        for task in study.prepared().values():
            task.estimator(np.zeros(len(task.subset)), task.subset)
        study.forecast()


def study_file(directory: Path) -> bytes:
    store = Store(directory / "study.sqlite")
    store.set(design={"tasks": ["a"]}, seed=1)
    trial = Trial("candidate", "c0", "done", 0, 0, (0.5,), {"weight": 0.5}, {"a": 0.5}, {"a": TrialEstimate(0.5)})
    store.add(trial, {"a": Answers(np.array([0, 1]), np.array([0.0, 1.0]))})
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._connection.execute("PRAGMA journal_mode=DELETE")
    store.close()
    return (directory / "study.sqlite").read_bytes()


def prepared_study() -> dict[str, bytes]:
    task = StudyTask(12, subset=4, estimator="gmp-irt", dimensions=1)
    design = Design(
        space={"weight": SearchParameter(0, 1), "method": SearchParameter(choices=("ties", "linear"))},
        tasks={"quiz": task},
        objectives=(Objective.of("quiz"),),
        models={"a": "./a", "b": "./b"},
        search=Search(population=6, generations=2),
    )
    answers = {label: np.random.default_rng(seed).random(task.pool).round() for seed, label in enumerate("ab")}
    return {
        "design.json": json.dumps(to_document(design)).encode(),
        "prepared": to_bytes(prepare("quiz", task, 0, answers)),
    }


def irt_file(place: Path) -> bytes:
    items = Items(np.ones((4, 2)), np.zeros(4))
    IRT(np.zeros((3, 2)), items, Normal(np.zeros(2), np.ones(2)), None, {2: 0.5}).save(place / "irt.safetensors")
    return (place / "irt.safetensors").read_bytes()
