"""Looking at models in weight space: the theory of task vectors, trajectories, landscapes, similarity, disentanglement.

Modules load on first use: `merganser.analysis.gradients`, `.trajectory`, `.tangent`, `.disentanglement`, `.landscape`,
`.similarity`, `.mergeability`, `.plots`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = ("disentanglement", "gradients", "landscape", "mergeability", "plots", "similarity", "tangent", "trajectory")

__all__ = [*_MODULES]

if TYPE_CHECKING:
    from merganser.analysis import disentanglement as disentanglement
    from merganser.analysis import gradients as gradients
    from merganser.analysis import landscape as landscape
    from merganser.analysis import mergeability as mergeability
    from merganser.analysis import plots as plots
    from merganser.analysis import similarity as similarity
    from merganser.analysis import tangent as tangent
    from merganser.analysis import trajectory as trajectory


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"merganser.analysis.{name}")
    raise AttributeError(f"module 'merganser.analysis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
