"""Permutation symmetries of networks: derive them from a module, match models through them, merge in the universe.

Names are loaded on first use. No module of this package may carry the name of a function exported here (the import
system would put the module in the function's place): `symmetry` lives in `derivation`, its data in `symmetries`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    "symmetries": ("Symmetry",),
    "derivation": ("symmetry",),
    "selftest": ("self_test",),
    "permutations": ("scramble",),
    "matching": ("match",),
    "matches": ("Match",),
    "universes": ("Universe", "universe"),
    "baselines": ("match_to_reference", "merge_many"),
    "renormalisation": ("repair", "reset_batch_norm"),
    "ensembles": ("UniverseEnsemble", "ensemble"),
    "transfer": ("transport",),
    "subsets": ("compare_subsets", "merging_order", "quality_matrix"),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Match",
    "Symmetry",
    "Universe",
    "UniverseEnsemble",
    "compare_subsets",
    "ensemble",
    "match",
    "match_to_reference",
    "merge_many",
    "merging_order",
    "quality_matrix",
    "repair",
    "reset_batch_norm",
    "scramble",
    "self_test",
    "symmetry",
    "transport",
    "universe",
]

if TYPE_CHECKING:
    from merganser.align.baselines import match_to_reference, merge_many
    from merganser.align.derivation import symmetry
    from merganser.align.ensembles import UniverseEnsemble, ensemble
    from merganser.align.matches import Match
    from merganser.align.matching import match
    from merganser.align.permutations import scramble
    from merganser.align.renormalisation import repair, reset_batch_norm
    from merganser.align.selftest import self_test
    from merganser.align.subsets import compare_subsets, merging_order, quality_matrix
    from merganser.align.symmetries import Symmetry
    from merganser.align.transfer import transport
    from merganser.align.universes import Universe, universe


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
