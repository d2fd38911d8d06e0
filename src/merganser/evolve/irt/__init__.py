"""Item response theory: abilities of models and parameters of questions from answers. Only `fit` needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, {"fitting": ("fit",), "model": ("IRT", "Items", "Normal")})

if TYPE_CHECKING:
    from merganser.evolve.irt.fitting import fit as fit
    from merganser.evolve.irt.model import IRT as IRT
    from merganser.evolve.irt.model import Items as Items
    from merganser.evolve.irt.model import Normal as Normal
