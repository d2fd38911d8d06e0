"""Streamed inner products between whole checkpoints, from which distances, cosines and projections follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import numpy as np

from merganser.checkpoints import Checkpoint
from merganser.checkpoints import open as open_checkpoint
from merganser.checkpoints.base import TensorSpec, is_integer
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.quantised import refuse_quantised
from merganser.engine.geometry import Entries, pair_sums
from merganser.errors import CheckpointError, InputError

STATISTICS = ("*running_mean", "*running_var")
"""Buffers with moments of the data, which are not weights; excluded from weight-space geometry by default."""


def inner_products(
    checkpoints: Sequence[Reference], *, base: Reference | None = None, exclude: Sequence[str] = STATISTICS
) -> Entries:
    """Return G_ij = ⟨θ_i − base, θ_j − base⟩ (base 0 if none) over floating tensors not in `exclude`, in float64.

    Needs memory for a few rows of one tensor per checkpoint, for any size. NaN and infinity in weights are propagated;
    see `finite_products`.
    """
    return _sum_pairs(checkpoints, base, exclude, lambda a, b: a * b)


def finite_products(
    checkpoints: Sequence[Reference], *, base: Reference, exclude: Sequence[str] = STATISTICS
) -> Entries:
    """Return inner products; raise an error that names a checkpoint with NaN or infinity."""
    gram = inner_products(checkpoints, base=base, exclude=exclude)
    if np.isfinite(gram).all():
        return gram
    names = ["the base", *(f"checkpoint {i} after it" for i in range(1, len(checkpoints) + 1))]
    for name, reference in zip(names, [base, *checkpoints], strict=True):
        if not np.isfinite(inner_products([reference], exclude=exclude)).all():
            raise InputError(f"{open_checkpoint(reference).label}, {name}: contains NaN, infinite or enormous values")
    raise InputError("the checkpoints are too far apart for their distances to be numbers")


def distances(checkpoints: Sequence[Reference], *, exclude: Sequence[str] = STATISTICS) -> Entries:
    """Return ‖θ_i − θ_j‖, summed entry by entry: inner products would lose the distances of nearly equal models."""
    found: Entries = np.sqrt(_sum_pairs(checkpoints, None, exclude, lambda a, b: (a - b) ** 2))
    return found


def _sum_pairs(
    checkpoints: Sequence[Reference],
    base: Reference | None,
    exclude: Sequence[str],
    entry: Callable[[Entries, Entries], Entries],
) -> Entries:
    """Return Σ entry(θ_i − base, θ_j − base), after checking that all have the same tensors."""
    given = [open_checkpoint(each) for each in (*checkpoints, *([] if base is None else [base]))]
    for checkpoint in given:
        refuse_quantised(checkpoint, exclude)
    names = [name for name, _ in list_shared_tensors(given, exclude)]
    return pair_sums(given[: len(checkpoints)], names, entry, None if base is None else given[-1])


def list_shared_tensors(checkpoints: Sequence[Checkpoint], exclude: Sequence[str] = ()) -> list[tuple[str, TensorSpec]]:
    """Return the floating tensors of the first checkpoint, after checking that all have them in the same shapes."""
    first = checkpoints[0]

    def kept(checkpoint: Checkpoint) -> dict[str, TensorSpec]:
        names = (n for n in checkpoint.names() if not any(fnmatchcase(n, pattern) for pattern in exclude))
        return {n: s for n in names if not is_integer((s := checkpoint.spec(n)).dtype)}

    expected = kept(first)
    for index, other in enumerate(checkpoints[1:], start=1):
        found = kept(other)
        if missing := next(iter([n for n in expected if n not in other] + [n for n in found if n not in first]), None):
            owner = index if missing in expected else 0
            raise CheckpointError(f"checkpoint {owner} ({checkpoints[owner].label}) has no tensor {missing!r}")
        for name, spec in expected.items():
            if (shape := other.spec(name).shape) != spec.shape:
                raise CheckpointError(
                    f"{name!r} has shape {list(spec.shape)} in checkpoint 0 ({first.label}) and {list(shape)} in "
                    f"checkpoint {index} ({other.label})"
                )
    return list(expected.items())
