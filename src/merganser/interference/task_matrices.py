"""Task matrices Δ = expert − base, tensor by tensor: from checkpoints, or from the factors of a library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, TensorSpec, is_integer, row_blocks
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import CheckpointError, InputError
from merganser.interference.sti import Overlap
from merganser.kernels.leading import leading_svd, spectrum_and_leading_svd
from merganser.kernels.spectra import Factors
from merganser.library.changes import check_finite, check_fit, is_change, task_matrix
from merganser.library.library import Library
from merganser.library.unfolding import as_matrix, is_matrix
from merganser.methods.matrices import FLOOR, matrix_shape, side_by_side

_ELEMENTS = 1 << 22
#: Length of the float32 products that are summed in float64.
_RUN = 1 << 14


class TaskMatrices(ABC):
    """The task matrices of several experts of one base."""

    names: Sequence[str]
    truncated: bool
    base: Checkpoint

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the float tensors that every expert shares with the base."""

    @abstractmethod
    def left_out(self) -> dict[str, tuple[str, ...]]:
        """Return, for every expert, the tensors that the base lacks."""

    @abstractmethod
    def factors(self, name: str, k: int) -> list[Factors]:
        """Return the top k components of every expert."""

    @abstractmethod
    def decomposed(self, name: str, k: int) -> list[tuple[Tensor, Factors]]:
        """Return all singular values of every expert, and its top k components."""

    @abstractmethod
    def inner_products(self, name: str) -> Tensor:
        """Return ⟨Δ_a, Δ_b⟩ for one tensor."""


class WholeTaskMatrices(TaskMatrices):
    """Experts as checkpoints."""

    def __init__(self, base: Checkpoint, experts: Mapping[str, Checkpoint]) -> None:
        self.base = base
        self.names = list(experts)
        self.truncated = False
        self._experts = list(experts.values())
        for expert in self._experts:
            check_fit(base, expert)
            if not any(name in expert and is_change(base, name, expert.spec(name)) for name in base.names()):
                raise CheckpointError(f"{expert.label}: no tensor has the shape it has in the base {base.label}")

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        for name in self.base.names():
            spec = self.base.spec(name)
            if not is_integer(spec.dtype) and all(expert.spec(name).shape == spec.shape for expert in self._experts):
                yield name, spec

    def left_out(self) -> dict[str, tuple[str, ...]]:
        named = zip(self.names, self._experts, strict=True)
        return {name: _find_own_tensors(self.base, expert, expert.names()) for name, expert in named}

    def factors(self, name: str, k: int) -> list[Factors]:
        return [leading_svd(self._matrix(expert, name), k).above(FLOOR) for expert in self._experts]

    def decomposed(self, name: str, k: int) -> list[tuple[Tensor, Factors]]:
        def decompose(expert: Checkpoint) -> tuple[Tensor, Factors]:
            values, factors = spectrum_and_leading_svd(self._matrix(expert, name), k)
            return values, factors.above(FLOOR)

        return side_by_side(decompose, self._experts)

    def _matrix(self, expert: Checkpoint, name: str) -> Tensor:
        return as_matrix(task_matrix(self.base, expert, name))

    def inner_products(self, name: str) -> Tensor:
        spec = self.base.spec(name)
        total = torch.zeros(len(self._experts), len(self._experts), dtype=torch.float64)
        for rows in row_blocks(spec, entries=_ELEMENTS // len(self._experts)):
            ours = self.base.read(name, rows)
            read = [expert.read(name, rows) for expert in self._experts]
            # Far cheaper than finding zeros among differences.
            if all(theirs.dtype == ours.dtype and torch.equal(theirs, ours) for theirs in read):
                continue
            wide = torch.float64 if torch.float64 in (ours.dtype, *(t.dtype for t in read)) else torch.float32
            ours = ours.to(wide)
            flat = torch.stack([self._delta(index, name, theirs.to(wide), ours) for index, theirs in enumerate(read)])
            total += inner_products(flat)
        return total

    def _delta(self, index: int, name: str, theirs: Tensor, ours: Tensor) -> Tensor:
        delta = theirs - ours
        if not bool(delta.sum().isfinite()):
            if torch.equal(theirs, ours):  # infinite in both, such as a mask
                return torch.zeros_like(delta).flatten()
            check_finite(theirs, name, f"{self.names[index]}, {self._experts[index].label}")
            check_finite(ours, name, self.base.label)
        return delta.flatten()


class StoredTaskMatrices(TaskMatrices):
    """Experts of a library, from their factors."""

    def __init__(self, library: Library, names: Iterable[str] | None) -> None:
        self.base = library.base
        self.names = list(library.experts if names is None else names)
        self.truncated = True
        self._experts = [library.expert(name) for name in self.names]

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        for name in self.base.names():
            if any(name in e.file.kinds for e in self._experts) and all(e.merges(name) for e in self._experts):
                yield name, self.base.spec(name)

    def left_out(self) -> dict[str, tuple[str, ...]]:
        return {expert.name: _find_own_tensors(self.base, expert, expert.file.kinds) for expert in self._experts}

    def factors(self, name: str, k: int) -> list[Factors]:
        d, m = matrix_shape(self.base.spec(name).shape)
        nothing = Factors(*(torch.zeros(size, dtype=torch.float64) for size in ((d, 0), (0,), (m, 0))))
        return [found if (found := expert.factors(name, k)) is not None else nothing for expert in self._experts]

    def decomposed(self, name: str, k: int) -> list[tuple[Tensor, Factors]]:
        whole = self.factors(name, min(matrix_shape(self.base.spec(name).shape)))
        return [(factors.s, factors.truncate(k)) for factors in whole]

    def inner_products(self, name: str) -> Tensor:
        shape = self.base.spec(name).shape
        if is_matrix(shape) and all(expert.file.kinds.get(name) in (None, "factors") for expert in self._experts):
            return Overlap.of(self.factors(name, min(matrix_shape(shape)))).inner_products()
        flat = torch.stack([expert.delta(name).double().flatten() for expert in self._experts])
        return flat @ flat.T


def inner_products(rows: Tensor) -> Tensor:
    """Return A Aᵀ of a few long rows in float64; float32 rows are multiplied in float32, in runs that lose no
    digits.
    """
    count, length = rows.shape
    even = length - length % _RUN
    runs = rows[:, :even].view(count, -1, _RUN).transpose(0, 1)
    rest = rows[:, even:].double()
    return (runs @ runs.mT).sum(dim=0, dtype=torch.float64) + rest @ rest.T


def _find_own_tensors(base: Checkpoint, expert: Checkpoint, names: Iterable[str]) -> tuple[str, ...]:
    """Return the tensors that the base lacks or has in another shape."""
    return tuple(t for t in names if t not in base or base.spec(t).shape != expert.spec(t).shape)


def open_task_matrices(
    base: Reference | Library, experts: Mapping[str, Reference] | Sequence[str] | None
) -> TaskMatrices:
    if isinstance(base, Library):
        source: TaskMatrices = StoredTaskMatrices(base, experts)
    elif isinstance(experts, Mapping):
        source = WholeTaskMatrices(open_checkpoint(base), {name: open_checkpoint(ref) for name, ref in experts.items()})
    else:
        raise InputError("give the experts of the base, as in {'task': checkpoint, …}")
    if not source.names:
        raise InputError("expected at least one expert")
    return source
