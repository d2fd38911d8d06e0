"""A start by propagation: place trees beside pinned axes first, then those beside trees already placed.

At the identity most of the gradient of a tree is noise, because its neighbours are not yet in order. Here a tree is
placed only by the terms whose other axes are pinned or placed,

    score = (value of the assignment − mean over all permutations) / √(‖W_a‖² ‖W_b‖²),

with the norms over *all* terms of the tree: the share of the possible agreement that is already certain. The tree with
the highest score is placed next. Without noise this recovers any permutation that the weights determine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from merganser.align.ascent import Ascent
from merganser.align.assignments import Assignments
from merganser.align.objective import inner
from merganser.align.placements import Placement
from merganser.kernels.assignment import Permutations


@dataclass(frozen=True)
class _Candidate:
    """The best permutation of a tree by the terms known so far, and its score."""

    terms: frozenset[int]
    solution: Permutations
    score: float


def propagate(ascent: Ascent, model: int, placed: Sequence[str] = ()) -> None:
    """Place every tree of one model that is not placed yet, from the pinned axes outwards; undetermined trees stay."""
    placement = ascent.placement
    left = [root for root in placement.layout.trees if root not in placed]
    candidates: dict[str, _Candidate] = {}
    while left:
        for root in left:
            known = _find_known_terms(placement, root, left)
            if root not in candidates or candidates[root].terms != known:
                candidates[root] = _candidate(placement, model, root, known, ascent.assignments)
        best = max(left, key=lambda root: candidates[root].score)
        if candidates[best].score <= 0.0:
            return
        ascent.set(model, best, candidates[best].solution)
        left.remove(best)


def _find_known_terms(placement: Placement, root: str, left: list[str]) -> frozenset[int]:
    """Return the terms with this tree on one axis, and only placed trees on the others."""
    found = set()
    for term, _ in placement.layout.places[root]:
        roots = [path[0] for path in placement.layout.terms[term].paths]
        if roots.count(root) == 1 and not any(other in left for other in roots if other != root):
            found.add(term)
    return frozenset(found)


def _candidate(
    placement: Placement, model: int, root: str, terms: frozenset[int], assignments: Assignments
) -> _Candidate:
    if not terms:
        return _Candidate(terms, {}, 0.0)
    profits = placement.linearise(model, root, terms).profits
    solution, value = assignments.best((model, root), placement.layout.trees[root], profits)
    by_chance = sum(
        float(np.sum(p, dtype=np.float64)) / prod(placement.layout.sizes(path)) for path, p in profits.items()
    )
    norm = _score_norm(placement, model, root)
    return _Candidate(terms, solution, (value - by_chance) / norm if norm else 0.0)


def _score_norm(placement: Placement, model: int, root: str) -> float:
    """Return √(‖W_p‖² ‖rest‖²) over the terms of a tree."""
    terms = {term for term, _ in placement.layout.places[root]}
    own = sum(inner(w, w) for w in (placement.images[model].weights[term] for term in terms))
    others = sum(inner(r, r) for r in (placement.rest(model, term) for term in terms))
    return float((own * others) ** 0.5)
