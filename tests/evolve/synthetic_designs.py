"""Small studies of the synthetic world."""

from __future__ import annotations

from synthetic_world import ITEMS

from merganser.evolve.design import Design, Objective, StudyTask
from merganser.evolve.space import Range, SearchParameter, Space


def design(**changes):
    settings = {
        "space": Space((SearchParameter("weight", Range(0, 2), models=("math", "code")),)),
        "tasks": (StudyTask("quiz", ITEMS, subset=20, estimator="gmp-irt"),),
        "objectives": (Objective.of("quiz"),),
        "endpoints": ("math", "code"),
        "population": 8,
        "generations": 4,
    }
    return Design(**(settings | changes))


def two_objectives(**changes):
    tasks = (StudyTask("quiz", ITEMS, subset=20), StudyTask("exam", ITEMS, subset=30))
    return design(
        tasks=tasks, objectives=(Objective.of("quiz"), Objective.of("exam")), **({"algorithm": "nsga2"} | changes)
    )
