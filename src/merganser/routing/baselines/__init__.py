"""Models to compare adaptive ones with, over the same library: static merges, the oracle, SMILE, WeMoE, Twin-Merging.

If the task is given, its head answers. Otherwise the gates vote for the task; for methods without gates, every head
takes part and the best (task, class) wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "base": ("Baseline",),
        "oracle": ("Oracle",),
        "smile": ("Smile",),
        "static": ("Static",),
        "twin_merging": ("TwinMerging",),
        "wemoe": ("WeMoE",),
    },
)

if TYPE_CHECKING:
    from merganser.routing.baselines.base import Baseline as Baseline
    from merganser.routing.baselines.oracle import Oracle as Oracle
    from merganser.routing.baselines.smile import Smile as Smile
    from merganser.routing.baselines.static import Static as Static
    from merganser.routing.baselines.twin_merging import TwinMerging as TwinMerging
    from merganser.routing.baselines.wemoe import WeMoE as WeMoE
