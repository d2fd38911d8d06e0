"""Permutation symmetries of networks: derive them from a module, match models through them, merge in the universe.

Names are loaded on first use. No module of this package may carry the name of a function exported here (the import
system would put the module in the function's place): `symmetry` lives in `derivation`, its data in `symmetries`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "symmetries": ("Atom", "Axis", "Block", "Factor", "Segment", "Symmetry"),
    "derivation": ("symmetry",),
    "selftest": ("self_test",),
    "permutations": ("Permutations", "scramble"),
    "matching": ("match",),
    "matches": ("Match",),
    "universes": ("Universe", "universe"),
    "baselines": ("match_to_reference", "merge_many"),
    "renormalisation": ("repair", "reset_batch_norm"),
    "ensembles": ("UniverseEnsemble", "ensemble", "sample_weights"),
    "transfer": ("transport",),
    "subsets": ("compare_subsets", "merging_order", "quality_matrix"),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
