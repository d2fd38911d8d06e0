"""Item response theory: abilities of models and demands of questions from who answered what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from merganser.evolve.irt.model import IRT, Items, Normal, load

if TYPE_CHECKING:
    from merganser.evolve.irt.fitting import fit

__all__ = ["IRT", "Items", "Normal", "fit", "load"]


def __getattr__(name: str) -> Any:
    if name == "fit":  # the only part that needs torch
        from merganser.evolve.irt.fitting import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
