"""Inner products between whole checkpoints, streamed: distances, cosines and projections need nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from merganser.checkpoints import Checkpoint
from merganser.checkpoints import open as open_checkpoint
from merganser.checkpoints.base import Rows, TensorSpec, View, is_integer
from merganser.checkpoints.opening import Reference
from merganser.engine.geometry import Parts, over_blocks
from merganser.errors import CheckpointError, InputError

STATISTICS = ("*running_mean", "*running_var")
"""Buffers that are moments of the data, not weights: left out of weight-space geometry by default."""

Entries: TypeAlias = NDArray[np.float64]


def inner_products(
    checkpoints: Sequence[Reference], *, base: Reference | None = None, exclude: Sequence[str] = STATISTICS
) -> Entries:
    """G_ij = ⟨θ_i − base, θ_j − base⟩ (base 0 if none) over all floating tensors not matching `exclude`, in float64.

    Memory is a few rows of one tensor per checkpoint, whatever their size. NaN and infinity in weights stay what they
    are; see `finite_products`.
    """
    return _summed(checkpoints, base, exclude, lambda a, b: a * b)


def finite_products(
    checkpoints: Sequence[Reference], *, base: Reference, exclude: Sequence[str] = STATISTICS
) -> Entries:
    """Inner products of what is to be reasoned about: a checkpoint with NaN or infinity is an error that names it."""
    gram = inner_products(checkpoints, base=base, exclude=exclude)
    if np.isfinite(gram).all():
        return gram
    names = ["the base", *(f"checkpoint {i} after it" for i in range(1, len(checkpoints) + 1))]
    for name, reference in zip(names, [base, *checkpoints], strict=True):
        if not np.isfinite(inner_products([reference], exclude=exclude)).all():
            raise InputError(f"{open_checkpoint(reference).label}, {name}: contains NaN, infinite or enormous values")
    raise InputError("the checkpoints are too far apart for their distances to be numbers")


def cosines(gram: Entries) -> Entries:
    """cos(θ_i, θ_j) from inner products; 0 where a vector is zero, NaN where one is not finite."""
    norms = np.sqrt(np.diag(gram))
    with np.errstate(invalid="ignore"):
        scale = np.outer(norms, norms)
    finite = np.isfinite(scale) & np.isfinite(gram)
    ratio: Entries = np.divide(gram, scale, out=np.where(finite, 0.0, np.nan), where=finite & (scale > 0))
    return ratio.clip(-1.0, 1.0)


def distances(checkpoints: Sequence[Reference], *, exclude: Sequence[str] = STATISTICS) -> Entries:
    """‖θ_i − θ_j‖, summed entry by entry: from inner products, those of models that hardly differ would be lost."""
    found: Entries = np.sqrt(_summed(checkpoints, None, exclude, lambda a, b: (a - b) ** 2))
    return found


def _summed(
    checkpoints: Sequence[Reference],
    base: Reference | None,
    exclude: Sequence[str],
    entry: Callable[[Entries, Entries], Entries],
) -> Entries:
    """Σ entry(θ_i − base, θ_j − base), symmetric in i and j; independent of threads, as `engine.geometry` is."""
    given = [open_checkpoint(each) for each in (*checkpoints, *([] if base is None else [base]))]
    opened = [_Here(each, each.label) for each in given]
    names = [name for name, _ in shared_tensors(opened, exclude)]
    count = len(checkpoints)
    pairs = [(i, j) for i in range(count) for j in range(i + 1)]

    def sums(parts: Parts) -> list[float]:
        with np.errstate(all="ignore"):
            moved = parts if base is None else [part - parts[-1] for part in parts[:-1]]
            return [float(np.add.reduce(entry(moved[i], moved[j]))) for i, j in pairs]

    blocks = [values for _, values in over_blocks(opened, names, sums)]
    total = np.zeros((count, count))
    for position, (i, j) in enumerate(pairs):
        total[i, j] = total[j, i] = _total([values[position] for values in blocks])
    return total


def _total(values: Sequence[float]) -> float:
    """The exact sum, rounded once; that of infinities of both signs is NaN."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


class _Here(View):
    """A checkpoint whose tensors are read into the memory of the processor, wherever they are."""

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        return self.source.read(name, rows).cpu()


def shared_tensors(checkpoints: Sequence[Checkpoint], exclude: Sequence[str] = ()) -> list[tuple[str, TensorSpec]]:
    """Floating tensors of the first checkpoint, after checking that all have the same ones in the same shapes."""
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
