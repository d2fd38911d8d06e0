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
    """Move a fine-tune to another base: θ_target + scale · π(θ_finetuned − θ_source).

    π matches the source base to the target base. Counters are the target's.

    Args:
        finetuned: The fine-tuned model.
        source: The base it was fine-tuned from.
        target: The base to move it to.
        symmetry: The symmetry of the architecture, from `mg.align.symmetry`.
        scale: The factor of the task vector.
        alignment: π, if it is known.
        method: How to match the bases; see `match`.
        **options: Further options of `match`.

    Returns:
        The moved weights.

    Example:
        >>> symmetry = mg.align.symmetry(base, images)
        >>> moved = mg.align.transport(math, base, models[1], symmetry)
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
