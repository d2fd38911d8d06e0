"""Small studies of the synthetic world."""

from __future__ import annotations

from dataclasses import fields

from synthetic_world import ITEMS

from merganser.evolve import Design, Objective, Search, SearchParameter, StudyTask


def design(**changes):
    """A design; settings of the search may be given beside the others."""
    search = {"population": 8, "generations": 4, "rerank": 0}
    search |= {field.name: changes.pop(field.name) for field in fields(Search) if field.name in changes}
    settings = {
        "space": {"weight": SearchParameter(0, 2, per="model")},
        "tasks": {"quiz": StudyTask(ITEMS, subset=20, estimator="gmp-irt")},
        "objectives": (Objective.of("quiz"),),
        "models": {"math": "./math", "code": "./code"},
        "search": Search(**search),
    }
    return Design(**(settings | changes))


def two_objectives(**changes):
    tasks = {"quiz": StudyTask(ITEMS, subset=20), "exam": StudyTask(ITEMS, subset=30)}
    return design(
        tasks=tasks, objectives=(Objective.of("quiz"), Objective.of("exam")), **({"algorithm": "nsga2"} | changes)
    )
