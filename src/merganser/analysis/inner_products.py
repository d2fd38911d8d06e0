"""Inner products between whole checkpoints, streamed: distances, cosines and projections need nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray

from merganser.checkpoints import Checkpoint
from merganser.checkpoints import open as open_checkpoint
from merganser.checkpoints.base import Rows, TensorSpec, is_integer
from merganser.checkpoints.opening import Reference
from merganser.errors import CheckpointError

STATISTICS = ("*running_mean", "*running_var")
"""Buffers that are moments of the data, not weights: left out of weight-space geometry by default."""

_CHUNK_ELEMENTS = 1 << 22


def inner_products(
    checkpoints: Sequence[Reference], *, base: Reference | None = None, exclude: Sequence[str] = STATISTICS
) -> NDArray[np.float64]:
    """G_ij = ⟨θ_i − base, θ_j − base⟩ (base 0 if none) over all floating tensors not matching `exclude`, in float64.

    Memory is a few rows of one tensor per checkpoint, whatever their size.
    """
    opened = [open_checkpoint(reference) for reference in checkpoints]
    origin = None if base is None else open_checkpoint(base)
    everything = opened if origin is None else [*opened, origin]
    total = np.zeros((len(opened), len(opened)))
    for name, spec in shared_tensors(everything, exclude):
        for rows in _row_chunks(spec):
            stack = torch.stack([c.read(name, rows).reshape(-1).to("cpu", torch.float64) for c in opened])
            if origin is not None:
                stack -= origin.read(name, rows).reshape(-1).to("cpu", torch.float64)
            total += (stack @ stack.T).numpy()
    return total


def cosines(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """cos(θ_i, θ_j) from inner products; 0 where a vector is zero."""
    norms = np.sqrt(np.diag(gram))
    scale = np.outer(norms, norms)
    ratio: NDArray[np.float64] = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
    return ratio.clip(-1.0, 1.0)


def distances(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """‖θ_i − θ_j‖ from inner products."""
    squares = np.diag(gram)
    return np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0))


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


def _row_chunks(spec: TensorSpec) -> Iterator[Rows | None]:
    if not spec.shape or spec.numel <= _CHUNK_ELEMENTS:
        yield None
        return
    height = max(1, _CHUNK_ELEMENTS * spec.shape[0] // spec.numel)
    for start in range(0, spec.shape[0], height):
        yield start, min(start + height, spec.shape[0])
