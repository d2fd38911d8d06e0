"""Merganser: merge, align, compress, route and evolve neural networks in weight space.

Importing this module is fast; torch and everything behind it load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "open": "merganser.checkpoints",
    "merge": "merganser.tuning.merging",
    "run": "merganser.engine.api",
    "TaskVector": "merganser.engine.task_vector",
    "MerganserError": "merganser.errors",
}
_PACKAGES = (
    "align",
    "analysis",
    "checkpoints",
    "errors",
    "evaluate",
    "evolve",
    "experts",
    "federated",
    "methods",
    "recipes",
    "report",
    "tuning",
)

__all__ = [*_NAMES, *_PACKAGES, "__version__"]

if TYPE_CHECKING:
    from merganser import align as align
    from merganser import analysis as analysis
    from merganser import checkpoints as checkpoints
    from merganser import errors as errors
    from merganser import evaluate as evaluate
    from merganser import evolve as evolve
    from merganser import experts as experts
    from merganser import federated as federated
    from merganser import methods as methods
    from merganser import recipes as recipes
    from merganser import report as report
    from merganser import tuning as tuning
    from merganser.checkpoints import open as open
    from merganser.engine.api import run as run
    from merganser.engine.task_vector import TaskVector as TaskVector
    from merganser.errors import MerganserError as MerganserError
    from merganser.tuning.merging import merge as merge


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"merganser.{name}")
    raise AttributeError(f"module 'merganser' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
