"""Transport of a task vector to another base of the same architecture: what was learned on one release, on the next."""

from __future__ import annotations

from typing import Any

import torch

from merganser.align.matches import Match
from merganser.align.matching import match
from merganser.align.permutations import Permutations, apply
from merganser.align.state import Model, State, states_of
from merganser.align.symmetries import Symmetry


def transport(
    finetuned: Model,
    source: Model,
    target: Model,
    symmetry: Symmetry,
    *,
    scale: float = 1.0,
    alignment: Match | Permutations | None = None,
    method: str = "weights",
    **options: Any,
) -> State:
    """θ_target + scale · π(θ_finetuned − θ_source), with π matching the source base to the target base.

    π is found by `match(target, source, symmetry, method, **options)` unless given. Counters are the target's.
    """
    tuned, base, new = states_of([finetuned, source, target], symmetry)
    if alignment is None:
        alignment = match(target, source, symmetry, method, **options)
    permutations = alignment.permutations if isinstance(alignment, Match) else alignment
    wide = {
        name: torch.promote_types(tensor.dtype, torch.float32)
        for name, tensor in new.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }
    delta = {name: tuned[name].to(dtype) - base[name].to(dtype) for name, dtype in wide.items()}
    moved = apply(symmetry, permutations, delta)
    return {
        name: (tensor.to(wide[name]) + scale * moved[name]).to(tensor.dtype) if name in wide else tensor.clone()
        for name, tensor in new.items()
    }
