"""Choose models to merge: quality of pairs, merging order, joint or separate matching.

A model that is hard to match degrades the whole merge; the composition of a set matters more than its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from merganser.align.matching import match
from merganser.align.permutations import identity
from merganser.align.solver import objective_of
from merganser.align.state import State, average, check_models, check_symmetry, states_of
from merganser.align.symmetries import Symmetry
from merganser.align.universes import Universe, universe
from merganser.checkpoints import open as open_checkpoint
from merganser.checkpoints.opening import Reference
from merganser.engine.geometry import cosines, inner_products
from merganser.errors import InputError
from merganser.modules.functional import WeightsScore


def quality_matrix(
    models: Sequence[Reference] | Universe,
    symmetry: Symmetry | None = None,
    *,
    score: WeightsScore | None = None,
    **options: Any,
) -> NDArray[np.float64]:
    """Measure how well every pair of models merges.

    Args:
        models: The models, or a universe whose maps are used as they are.
        symmetry: The symmetry of the architecture; not needed for a universe.
        score: A function of weights to score midpoints with; without it, the cosine of the weights after matching.
        **options: Options of `match`, with which pairs are matched one by one.

    Returns:
        A symmetric array of shape (models, models). The diagonal is 1, or each model's own score.

    Example:
        >>> quality = mg.align.quality_matrix(models, mg.align.symmetry(models[0], images))
        >>> quality.shape
        (3, 3)
    """
    if not isinstance(models, Universe):
        check_models(models)
    pairs = _match_pairs(models, symmetry, options)
    known = models.symmetry if isinstance(models, Universe) else _require_scores(symmetry)
    names = [name for name in known.axes if name not in known.buffers and name not in known.aliases]
    quality = np.empty((len(models), len(models)))
    for (i, j), (first, second) in pairs:
        value = _cosine(first, second, names) if score is None else score(average([first, second]))
        quality[i, j] = quality[j, i] = value
    return quality


def merging_order(quality: ArrayLike) -> list[int]:
    """Return an order of models by quality: the best pair first, then always the model that fits the chosen ones best.

    Args:
        quality: How well every pair merges, shape (models, models), from `quality_matrix`.

    Returns:
        Indices of models.

    Example:
        >>> mg.align.merging_order([[1.0, 0.2, 0.9], [0.2, 1.0, 0.4], [0.9, 0.4, 1.0]])
        [0, 2, 1]
    """
    try:
        quality = np.asarray(quality, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"the quality of models is a square matrix of numbers: {error}") from None
    size = quality.shape[0] if quality.ndim else 0
    if quality.shape != (size, size) or size < 2:
        raise InputError(f"the quality of at least two models is a square matrix, got {quality.shape}")
    if np.isnan(quality).any():
        raise InputError("the quality of some pair is not a number")
    pairs = sorted(combinations(range(size), 2), key=lambda pair: -quality[pair])
    order = list(pairs[0])
    while len(order) < size:
        rest = [model for model in range(size) if model not in order]
        order.append(max(rest, key=lambda model: float(quality[model, order].mean())))
    return order


def merge_in_order(
    models: Sequence[Reference], symmetry: Symmetry, order: Sequence[int] | None = None, **options: Any
) -> Universe:
    """Merge one model after another: each is matched to the mean of those before it.

    Args:
        models: Two or more models of one architecture.
        symmetry: Their symmetry.
        order: All models in the order to take them; by default the `merging_order` of their cosines after matching.
        options: Options of `match` (method "weights" or "frank_wolfe": the mean has weights but no data).

    Returns:
        The models in the space of the first one taken, in the order they were given; `merged()` is the result.

    Raises:
        InputError: If the order does not contain every model once.

    Example:
        >>> merge_in_order(networks, symmetry).merged()  # doctest: +SKIP
    """
    states = states_of(models, symmetry, least=2)
    order = list(order) if order is not None else merging_order(quality_matrix(states, symmetry, **options))
    if sorted(order) != list(range(len(states))):
        raise InputError(f"an order of {len(states)} models names each of 0 … {len(states) - 1} once, got {order}")
    permutations = {order[0]: identity(symmetry)}
    mean = states[order[0]]
    for taken, model in enumerate(order[1:], 1):
        found = match(mean, states[model], symmetry, **options)
        permutations[model] = found.permutations
        mean = average([mean, found.apply(states[model])], [taken, 1])
    placed = tuple(permutations[model] for model in range(len(states)))
    return Universe(symmetry, tuple(states), placed, objective_of(states, placed, symmetry))


@dataclass(frozen=True)
class SubsetComparison:
    """One subset matched jointly with all models and separately: objectives on the subset, and scores if requested."""

    members: tuple[int, ...]
    joint_objective: float
    separate_objective: float
    joint_score: float | None = None
    separate_score: float | None = None


def compare_subsets(
    joint: Universe,
    *,
    size: int | None = None,
    subsets: Iterable[Sequence[int]] | None = None,
    score: WeightsScore | None = None,
    **options: Any,
) -> list[SubsetComparison]:
    """Compare joint matching of all models with separate matching of subsets of them.

    Args:
        joint: The universe of all models.
        size: Compare all subsets of this size.
        subsets: The subsets to compare, as indices of models, instead of a size.
        score: A function of weights to score the merges with.
        **options: Further options of `universe`.

    Returns:
        One comparison per subset.

    Example:
        >>> universe = mg.align.universe(models, mg.align.symmetry(models[0], images))
        >>> rows = mg.align.compare_subsets(universe, size=2)
    """
    if (size is None) == (subsets is None):
        raise InputError("give either the size of the subsets or the subsets")
    if size is not None and not 2 <= size <= len(joint):
        raise InputError(f"a subset of {len(joint)} models has 2 to {len(joint)} of them, got size={size}")
    chosen = [tuple(s) for s in subsets] if subsets is not None else list(combinations(range(len(joint)), size or 0))
    rows = []
    for members in chosen:
        together = joint.subset(members)
        alone = universe(together.models, joint.symmetry, **options)
        scores = (score(together.merged()), score(alone.merged())) if score is not None else (None, None)
        rows.append(SubsetComparison(members, together.objective, alone.objective, *scores))
    return rows


def _require_scores(symmetry: Symmetry | None) -> Symmetry:
    if symmetry is None:
        raise InputError("models that are not yet in a universe need their symmetry")
    check_symmetry(symmetry)
    return symmetry


def _match_pairs(
    models: Sequence[Reference] | Universe, symmetry: Symmetry | None, options: dict[str, Any]
) -> Iterable[tuple[tuple[int, int], tuple[State, State]]]:
    size = len(models)
    pairs = [(i, j) for i in range(size) for j in range(i, size)]
    if isinstance(models, Universe):
        for i, j in pairs:
            yield (i, j), (models.to_universe(i), models.to_universe(j))
        return
    states = states_of(models, _require_scores(symmetry), least=2)
    for i, j in pairs:
        if i == j:
            yield (i, j), (states[i], states[i])
        else:
            yield (
                (i, j),
                (states[i], match(models[i], models[j], _require_scores(symmetry), **options).apply(models[j])),
            )


def _cosine(a: State, b: State, names: Iterable[str]) -> float:
    floating = [name for name in names if a[name].is_floating_point()]
    gram = inner_products([open_checkpoint({name: state[name] for name in floating}) for state in (a, b)])
    if not gram.diagonal().all():
        raise InputError("a model whose weights are all zero has no direction to compare")
    return float(cosines(gram)[0, 1])
