"""Merging with data: statistics as side checkpoints (Fisher, Gram), AdaMerging, ATM, soups, forgetting.

Modules load on first use: `tuning.fisher`, `.gram`, `.adamerging`, `.atm`, `.soups`, `.search`, `.sweep`,
`.merging`, `.forgetting`, `.validation`, `.parts`, `.statistics`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = (
    "adamerging",
    "atm",
    "fisher",
    "forgetting",
    "gram",
    "merging",
    "parts",
    "search",
    "soups",
    "statistics",
    "sweep",
    "validation",
)

__all__ = [*_MODULES]

if TYPE_CHECKING:
    from merganser.tuning import adamerging as adamerging
    from merganser.tuning import atm as atm
    from merganser.tuning import fisher as fisher
    from merganser.tuning import forgetting as forgetting
    from merganser.tuning import gram as gram
    from merganser.tuning import merging as merging
    from merganser.tuning import parts as parts
    from merganser.tuning import search as search
    from merganser.tuning import soups as soups
    from merganser.tuning import statistics as statistics
    from merganser.tuning import sweep as sweep
    from merganser.tuning import validation as validation


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"merganser.tuning.{name}")
    raise AttributeError(f"module 'merganser.tuning' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
