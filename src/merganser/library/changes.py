"""The changes of an expert from its base, tensor by tensor, checked to be finite and to fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, TensorSpec, is_integer
from merganser.checkpoints.quantised import refuse_quantised
from merganser.errors import CheckpointError
from merganser.kernels.spectra import spectrum
from merganser.lazy import torch
from merganser.library.ranks import Changed
from merganser.library.unfolding import as_matrix, is_matrix

if TYPE_CHECKING:
    from torch import Tensor


def is_comparable(base: Checkpoint, name: str, spec: TensorSpec) -> bool:
    """Return whether the base has a tensor of an expert in the same shape, and integers only if the expert has."""
    if name not in base or base.spec(name).shape != spec.shape:
        return False
    return is_integer(base.spec(name).dtype) == is_integer(spec.dtype)


def is_change(base: Checkpoint, name: str, spec: TensorSpec) -> bool:
    """Return whether a tensor of an expert differs from the base by a Δ: both have it as floats, in one shape."""
    return not is_integer(spec.dtype) and is_comparable(base, name, spec)


def check_fit(base: Checkpoint, expert: Checkpoint) -> None:
    """Refuse an expert that lacks a weight of the base or has codes; it may have tensors of its own, such as heads.

    Integer buffers, such as the position ids that older versions of transformers saved, may be missing.
    """
    for checkpoint in (base, expert):
        refuse_quantised(checkpoint)
    for name in base.names():
        if name not in expert and not is_integer(base.spec(name).dtype):
            raise CheckpointError(f"{expert.label}: has no tensor {name!r}, which the base {base.label} has")


def check_finite(tensor: Tensor, name: str, where: str) -> None:
    """Refuse NaN and infinity, which cannot be stored, compared or merged. `where` names the model."""
    if is_integer(tensor.dtype):
        return
    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor
    # A sum is the cheapest test; only a suspicious one is examined further.
    if not bool(wide.sum().isfinite()) and not bool(wide.isfinite().all()):
        what = "NaN" if bool(wide.isnan().any()) else "infinite values"
        raise CheckpointError(f"{where}: tensor {name!r} contains {what}; use a sound checkpoint")


def changes(base: Checkpoint, expert: Checkpoint, spectra: bool, where: str) -> Iterator[Changed]:
    """Yield every tensor of the expert that differs from the base; `where` names the expert in messages."""
    for name in expert.names():
        spec = expert.spec(name)
        theirs = expert.read(name)
        if not is_comparable(base, name, spec):
            check_finite(theirs, name, where)
            yield Changed(name, spec, False)
            continue
        ours = base.read(name)
        if torch.equal(theirs, ours.to(spec.dtype)):
            continue
        check_finite(theirs, name, where)
        check_finite(ours, name, base.label)
        matrix = is_matrix(spec.shape) and not is_integer(spec.dtype)
        if not (matrix and spectra):
            yield Changed(name, spec, matrix, coded=not is_integer(spec.dtype))
            continue
        squares = spectrum(as_matrix(task_matrix(base, expert, name))).square()
        yield Changed(name, spec, True, squares.numpy(), coded=True)


def task_matrix(base: Checkpoint, expert: Checkpoint, name: str) -> Tensor:
    """Return θ_t − θ₀ in the tensor's own shape, in float32, or float64 if a source is."""
    ours, theirs = base.read(name), expert.read(name)
    wide = torch.float64 if torch.float64 in (ours.dtype, theirs.dtype) else torch.float32
    return theirs.to(wide) - ours.to(wide)
