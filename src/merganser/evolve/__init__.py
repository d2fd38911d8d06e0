"""Evolutionary merging with few evaluations: Extract, Estimate, Evolve (MERGE³)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "design": ("Design", "Search"),
        "objectives": ("Objective",),
        "preparation": ("Calibration",),
        "runs": ("recipe", "start"),
        "space": ("SearchParameter", "Space"),
        "study": ("Study",),
        "summary": ("summarize",),
        "tasks": ("StudyTask",),
    },
    modules=("estimators", "irt", "subsets"),
)

if TYPE_CHECKING:
    from merganser.evolve import estimators as estimators
    from merganser.evolve import irt as irt
    from merganser.evolve import subsets as subsets
    from merganser.evolve.design import Design as Design
    from merganser.evolve.design import Search as Search
    from merganser.evolve.objectives import Objective as Objective
    from merganser.evolve.preparation import Calibration as Calibration
    from merganser.evolve.runs import recipe as recipe
    from merganser.evolve.runs import start as start
    from merganser.evolve.space import SearchParameter as SearchParameter
    from merganser.evolve.space import Space as Space
    from merganser.evolve.study import Study as Study
    from merganser.evolve.summary import summarize as summarize
    from merganser.evolve.tasks import StudyTask as StudyTask
