"""Transport of a task vector to another base of the same architecture: what was learned on one release, on the next."""

from __future__ import annotations

from typing import Any

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
    delta = {
        name: tuned[name].float() - base[name].float() if base[name].is_floating_point() else base[name]
        for name in base
    }
    moved = apply(symmetry, permutations, delta)
    return {
        name: (tensor.float() + scale * moved[name]).to(tensor.dtype) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in new.items()
    }
