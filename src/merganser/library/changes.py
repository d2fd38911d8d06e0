"""What an expert changes of its base: tensor by tensor, checked to be finite and to fit."""

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


def is_change(base: Checkpoint, name: str, spec: TensorSpec) -> bool:
    """Whether a tensor of an expert differs from the base by a Δ: numbers of a tensor that both have in one shape."""
    return name in base and base.spec(name).shape == spec.shape and not is_integer(spec.dtype)


def check_fit(base: Checkpoint, expert: Checkpoint) -> None:
    """A tensor the base has and the expert lacks is an error, and so are codes; heads of its own it may have."""
    for checkpoint in (base, expert):
        refuse_quantised(checkpoint)
    for name in base.names():
        if name not in expert:
            raise CheckpointError(f"{expert.label}: has no tensor {name!r}, which the base {base.label} has")


def check_finite(tensor: Tensor, name: str, where: str) -> None:
    """NaN and infinity are no change that could be kept, compared or merged. `where` names the model."""
    if is_integer(tensor.dtype):
        return
    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor
    # A sum is the cheapest sieve: only a suspicious one is looked at twice.
    if not bool(wide.sum().isfinite()) and not bool(wide.isfinite().all()):
        what = "NaN" if bool(wide.isnan().any()) else "infinite values"
        raise CheckpointError(f"{where}: tensor {name!r} contains {what}; use a sound checkpoint")


def changes(base: Checkpoint, expert: Checkpoint, spectra: bool, where: str) -> Iterator[Changed]:
    """Every tensor of the expert that is not the base's; `where` is how messages call the expert."""
    for name in expert.names():
        spec = expert.spec(name)
        theirs = expert.read(name)
        if name not in base or base.spec(name).shape != spec.shape:
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
    """θ_t − θ₀ in the tensor's own shape, in float32, or float64 where a source is."""
    ours, theirs = base.read(name), expert.read(name)
    wide = torch.float64 if torch.float64 in (ours.dtype, theirs.dtype) else torch.float32
    return theirs.to(wide) - ours.to(wide)
