"""Permutation symmetries of networks: derive them from a module, match models through them, merge in the universe.

Names are loaded on first use. No module of this package may carry the name of a function exported here (the import
system would put the module in the function's place): `symmetry` lives in `derivation`, its data in `symmetries`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "baselines": ("match_to_reference", "merge_many"),
        "choice": ("UniverseChoice", "choose_universe"),
        "configs": ("symmetry_from_config",),
        "depths": ("Stretch", "stretch"),
        "derivation": ("symmetry",),
        "ensembles": ("UniverseEnsemble", "ensemble"),
        "matches": ("Match",),
        "matching": ("match",),
        "permutations": ("scramble",),
        "renormalisation": ("repair", "reset_batch_norm"),
        "saving": ("save_aligned",),
        "selftest": ("self_test",),
        "subsets": ("compare_subsets", "merge_in_order", "merging_order", "quality_matrix"),
        "symmetries": ("Symmetry",),
        "transported": ("Transport", "transport_checkpoint"),
        "transports": ("transport",),
        "universes": ("Universe", "universe"),
        "zips": ("Zip", "zip"),
    },
)

if TYPE_CHECKING:
    from merganser.align.baselines import match_to_reference as match_to_reference
    from merganser.align.baselines import merge_many as merge_many
    from merganser.align.choice import UniverseChoice as UniverseChoice
    from merganser.align.choice import choose_universe as choose_universe
    from merganser.align.configs import symmetry_from_config as symmetry_from_config
    from merganser.align.depths import Stretch as Stretch
    from merganser.align.depths import stretch as stretch
    from merganser.align.derivation import symmetry as symmetry
    from merganser.align.ensembles import UniverseEnsemble as UniverseEnsemble
    from merganser.align.ensembles import ensemble as ensemble
    from merganser.align.matches import Match as Match
    from merganser.align.matching import match as match
    from merganser.align.permutations import scramble as scramble
    from merganser.align.renormalisation import repair as repair
    from merganser.align.renormalisation import reset_batch_norm as reset_batch_norm
    from merganser.align.saving import save_aligned as save_aligned
    from merganser.align.selftest import self_test as self_test
    from merganser.align.subsets import compare_subsets as compare_subsets
    from merganser.align.subsets import merge_in_order as merge_in_order
    from merganser.align.subsets import merging_order as merging_order
    from merganser.align.subsets import quality_matrix as quality_matrix
    from merganser.align.symmetries import Symmetry as Symmetry
    from merganser.align.transported import Transport as Transport
    from merganser.align.transported import transport_checkpoint as transport_checkpoint
    from merganser.align.transports import transport as transport
    from merganser.align.universes import Universe as Universe
    from merganser.align.universes import universe as universe
    from merganser.align.zips import Zip as Zip
    from merganser.align.zips import zip as zip
