"""Merganser: merge, align, compress, route and evolve neural networks in weight space.

Importing this module is fast; torch and everything behind it load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "checkpoints": ("open",),
        "recipes.running": ("merge", "run"),
        "recipes.saving": ("save",),
        "engine.task_vector": ("TaskVector",),
        "errors": ("MerganserError",),
    },
    modules=(
        "align",
        "analysis",
        "checkpoints",
        "errors",
        "evaluate",
        "evolve",
        "experts",
        "federated",
        "interference",
        "library",
        "methods",
        "origin",
        "recipes",
        "report",
        "routing",
        "surgery",
        "tuning",
    ),
)

if TYPE_CHECKING:
    from merganser import align as align
    from merganser import analysis as analysis
    from merganser import checkpoints as checkpoints
    from merganser import errors as errors
    from merganser import evaluate as evaluate
    from merganser import evolve as evolve
    from merganser import experts as experts
    from merganser import federated as federated
    from merganser import interference as interference
    from merganser import library as library
    from merganser import methods as methods
    from merganser import origin as origin
    from merganser import recipes as recipes
    from merganser import report as report
    from merganser import routing as routing
    from merganser import surgery as surgery
    from merganser import tuning as tuning
    from merganser.checkpoints import open as open
    from merganser.engine.task_vector import TaskVector as TaskVector
    from merganser.errors import MerganserError as MerganserError
    from merganser.recipes.running import merge as merge
    from merganser.recipes.running import run as run
    from merganser.recipes.saving import save as save
