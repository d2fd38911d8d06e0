"""Match attention heads by singular values, before anything else is matched.

The singular values of a head's part of a weight, (units of the head) × (everything else), are invariant under
permutations and rotations of the units inside the head and of the channels that the weight reads or writes. So heads
can be matched while the residual stream is still in another order (the first of the two levels of arXiv:2505.22697).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from merganser.align.ascent import Ascent
from merganser.align.terms import TermLayout
from merganser.kernels.linear_assignment import Index, assign


def place_heads(ascent: Ascent, weights: Sequence[Sequence[Tensor]]) -> None:
    """Match the outermost units of every nested tree of the second of two models to those of the first."""
    layout = ascent.placement.layout
    for root, tree in layout.trees.items():
        if tree.children:
            ascent.set(1, root, tree.identity() | {root: match_heads(layout, root, weights)})


def match_heads(layout: TermLayout, root: str, weights: Sequence[Sequence[Tensor]]) -> Index:
    """Return the assignment of heads that minimises Σ ‖σ_a(h) − σ_b(π(h))‖²."""
    first, second = ([_spectra(layout, root, term, own[term]) for term, _ in layout.places[root]] for own in weights)
    costs = [torch.cdist(a, b).square() for a, b in zip(first, second, strict=True)]
    return assign(-np.sum([cost.double().cpu().numpy() for cost in costs], axis=0))


def _spectra(layout: TermLayout, root: str, term: int, array: Tensor) -> Tensor:
    """Return the (heads, singular values) of one term."""
    paths = layout.terms[term].paths
    axis = next(i for i, path in enumerate(paths) if path[0] == root)
    heads, *inner = layout.sizes(paths[axis])
    own = array.movedim(axis, 0).reshape(heads, prod(inner), -1)
    values: Tensor = torch.linalg.svdvals(own)
    return values
