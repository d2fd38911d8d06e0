"""Merging with data: statistics as side checkpoints (Fisher, Gram), AdaMerging, ATM, soups, forgetting.

Modules load on first use: `tuning.fisher`, `.gram`, `.adamerging`, `.atm`, `.soups`, `.search`, `.sweep`,
`.merging`, `.forgetting`, `.validation`, `.parts`, `.statistics`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {},
    modules=(
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
    ),
)

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
