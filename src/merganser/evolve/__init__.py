"""Evolutionary merging with few evaluations: Extract, Estimate, Evolve (MERGE³)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from merganser.evolve import estimators, irt, subsets
    from merganser.evolve.design import Design, Objective, Task
    from merganser.evolve.preparation import Calibration
    from merganser.evolve.space import Choices, Parameter, Range, Space
    from merganser.evolve.starting import recipe, start
    from merganser.evolve.study import Study
    from merganser.evolve.summary import summarize

_NAMES = {
    "Calibration": "preparation",
    "Choices": "space",
    "Design": "design",
    "Objective": "design",
    "Parameter": "space",
    "Range": "space",
    "Space": "space",
    "Study": "study",
    "Task": "design",
    "recipe": "starting",
    "start": "starting",
    "summarize": "summary",
}
_MODULES = ("estimators", "irt", "subsets")

__all__ = [
    "Calibration",
    "Choices",
    "Design",
    "Objective",
    "Parameter",
    "Range",
    "Space",
    "Study",
    "Task",
    "estimators",
    "irt",
    "recipe",
    "start",
    "subsets",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"merganser.evolve.{_NAMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"merganser.evolve.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
