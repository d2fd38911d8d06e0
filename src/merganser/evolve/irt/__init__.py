"""Item response theory: abilities of models and demands of questions from who answered what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from merganser.evolve.irt.logistic import Posterior, regress
from merganser.evolve.irt.model import IRT, Items, Normal, load

if TYPE_CHECKING:
    from merganser.evolve.irt.fitting import fit, log_loss

__all__ = ["IRT", "Items", "Normal", "Posterior", "fit", "load", "log_loss", "regress"]


def __getattr__(name: str) -> Any:
    if name in ("fit", "log_loss"):  # the only parts that need torch
        from merganser.evolve.irt import fitting

        return getattr(fitting, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
