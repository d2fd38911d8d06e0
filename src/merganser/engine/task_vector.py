"""Task vectors: lazy expressions over checkpoints that are computed while they are read.

>>> math, code, toxic = (mg.TaskVector(path, base) for path in paths)
>>> mg.save(mg.open(base) + 0.4 * (math + code) - toxic, "out/")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Union, overload

import numpy as np
import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, Rows, View, hash_text
from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.checkpoints.quantised import codes_of
from merganser.checkpoints.vectors import (
    Combination,
    Difference,
    Largest,
    Masked,
    Restricted,
    Stored,
    TruncatedVector,
    Vector,
    compute_in_blocks,
    widen,
)
from merganser.engine import geometry
from merganser.errors import CheckpointError, InputError, did_you_mean

Mask = Union["TaskVector", Callable[[str, Tensor], Tensor]]


class TaskVector(View):
    """The difference τ = θ − θ_0 of two checkpoints, and linear combinations of such differences.

    A task vector is lazy: tensors are computed when they are read, in blocks, so that checkpoints may be larger than
    memory. It is itself a checkpoint, in float32 (float64 where a source is). Add and subtract task vectors, multiply
    them by numbers, and add them to a base. Modules and tensors are not copied: if you train a module on, its task
    vector changes with it.

    Args:
        finetuned: θ: a path, hub id, state dict, module or checkpoint.
        base: θ_0: the same kinds of reference.
        exclude: Globs of tensors to leave out, such as the heads of different tasks.

    Raises:
        CheckpointError: If the two cannot be opened or their tensors differ.

    Example:
        >>> math_vector, code_vector = mg.TaskVector("math", "base"), mg.TaskVector("code", "base")
        >>> merged = mg.open("base") + 0.4 * (math_vector + code_vector)
        >>> written = mg.save(merged, "out")
    """

    def __init__(self, finetuned: Reference, base: Reference, *, exclude: Sequence[str] = ()) -> None:
        self._hold(Difference(open_checkpoint(finetuned), open_checkpoint(base), exclude))

    @classmethod
    def load(cls, reference: Reference, *, exclude: Sequence[str] = ()) -> TaskVector:
        """Open a checkpoint or state dict that already holds differences, such as one written by `mg.save`."""
        return cls._of(Stored(open_checkpoint(reference), exclude))

    @classmethod
    def _of(cls, vector: Vector) -> TaskVector:
        made = cls.__new__(cls)
        made._hold(vector)
        return made

    def _hold(self, vector: Vector) -> None:
        super().__init__(vector, vector.label)
        self.vector = vector

    def fingerprint(self) -> str:
        return self.vector.fingerprint()

    def lineage(self) -> Lineage:
        return self.vector.lineage()

    def __repr__(self) -> str:
        return f"TaskVector({self.label})"

    def __add__(self, other: TaskVector) -> TaskVector:
        if isinstance(other, TaskVector):
            return self._of(Combination([(1.0, self.vector), (1.0, other.vector)]))
        return NotImplemented

    @overload
    def __radd__(self, other: int) -> TaskVector: ...
    @overload
    def __radd__(self, other: Checkpoint) -> Applied: ...
    def __radd__(self, other: Checkpoint | int) -> TaskVector | Applied:
        """Return `base + τ` for an opened base, the same as `τ.apply_to(base)`."""
        if isinstance(other, Applied):
            return other.moved(self.vector, 1.0)
        if isinstance(other, Checkpoint):
            return self.apply_to(other)
        return self if isinstance(other, int) and other == 0 else NotImplemented  # sum() starts from 0

    def __rsub__(self, other: Checkpoint) -> Applied:
        """Return `base − τ` for an opened base."""
        if isinstance(other, Applied):
            return other.moved(self.vector, -1.0)
        return self.apply_to(other, -1.0) if isinstance(other, Checkpoint) else NotImplemented

    def __sub__(self, other: TaskVector) -> TaskVector:
        if not isinstance(other, TaskVector):
            return NotImplemented
        return self._of(Combination([(1.0, self.vector), (-1.0, other.vector)]))

    def __neg__(self) -> TaskVector:
        return self * -1.0

    def __mul__(self, factor: float | Tensor) -> TaskVector:
        if (number := _as_number(factor)) is None:
            return NotImplemented
        return self._of(Combination([(number, self.vector)]))

    __rmul__ = __mul__
    __array_ufunc__ = None  # numbers of numpy leave the product to the task vector

    def __truediv__(self, divisor: float | Tensor) -> TaskVector:
        if (number := _as_number(divisor)) is None:
            return NotImplemented
        if number == 0:
            raise InputError(f"{self.label} divided by zero")
        return self * (1.0 / number)

    def only(self, *globs: str) -> TaskVector:
        """Return the vector restricted to tensors whose names match; the others count as zero."""
        return self._of(Restricted(self.vector, globs, keep=True))

    def without(self, *globs: str) -> TaskVector:
        """Return the vector without tensors whose names match."""
        return self._of(Restricted(self.vector, globs, keep=False))

    def masked(self, mask: Mask) -> TaskVector:
        """Keep the entries where another task vector is nonzero, or where `mask(name, tensor)` is true.

        A function sees blocks of rows of this vector, and must treat each entry independently.
        """
        if isinstance(mask, TaskVector):
            return self._of(Masked(self.vector, lambda name, own, other: other != 0, "where", mask.vector))
        function = mask
        relation = f"where {getattr(function, '__qualname__', type(function).__qualname__)}"
        return self._of(Masked(self.vector, lambda name, own, other: function(name, own), relation))

    def agreeing(self, other: TaskVector) -> TaskVector:
        """Keep the entries with the same sign as in another task vector."""
        return self._of(Masked(self.vector, lambda name, a, b: a.sign() == b.sign(), "agreeing with", other.vector))

    def top(self, density: float, by: TaskVector | None = None) -> TaskVector:
        """Keep the largest entries of each tensor by magnitude, exactly; or those where another vector is largest."""
        return self._of(Largest(self.vector, density, by.vector if by is not None else None))

    def low_rank(self, rank: int | float) -> TaskVector:
        """Keep the leading singular components of every matrix: a number, or a share of them as a float up to 1.0."""
        return self._of(TruncatedVector(self.vector, rank))

    def dot(self, other: TaskVector) -> float:
        return float(geometry.inner_products([self, other])[0, 1])

    def norm(self) -> float:
        return math.sqrt(float(geometry.inner_products([self])[0, 0]))

    def norms(self) -> dict[str, float]:
        """Return the norm of every tensor."""
        return geometry.norms(self)

    def cosine(self, other: TaskVector) -> float:
        """Return cos(τ, τ'); 0 if one of them is zero, NaN if one is not finite."""
        return float(geometry.cosines(geometry.inner_products([self, other]))[0, 1])

    def sign_agreement(self, other: TaskVector) -> float:
        """Return the share of equal signs among entries where both are nonzero; NaN if there are none."""
        return geometry.sign_agreement(self, other)

    def apply_to(self, base: Reference, scale: float = 1.0) -> Applied:
        """Return θ = base + scale · τ as a checkpoint, computed while it is read."""
        return Applied(open_checkpoint(base), self.vector, scale)


class Applied(View):
    """The checkpoint base + scale · τ. Changed tensors are read in float32 or wider and rounded once, when written."""

    def __init__(self, base: Checkpoint, vector: Vector, scale: float = 1.0) -> None:
        super().__init__(base, f"{base.label} + {scale:g}·({vector.label})")
        self.vector, self.scale = vector, scale
        self._moved: dict[str, str] = {}
        codes = codes_of(base)
        for name in vector.names():
            if name not in base:
                raise CheckpointError(
                    f"the task vector changes {name!r}, which {base.label} does not "
                    f"have{did_you_mean(name, base.names())}"
                )
            if base.spec(name).shape != vector.spec(name).shape:
                raise CheckpointError(
                    f"{name!r} is {vector.spec(name)} in the task vector and {base.spec(name)} in {base.label}"
                )
            stored = base.resolve_alias(name)
            if stored in codes:
                raise CheckpointError(
                    f"the task vector changes {name!r}, {base.spec(name)} of {base.label}, which belongs to the "
                    "codes of a quantised model; dequantise it first"
                )
            if stored in self._moved:
                raise CheckpointError(
                    f"{base.label} ties {name!r} to {self._moved[stored]!r}, and the task vector changes both; "
                    "exclude one of them"
                )
            self._moved[stored] = name

    def moved(self, vector: Vector, scale: float) -> Applied:
        """Return this model moved further by scale · τ', as one expression on the same base."""
        return Applied(self.source, Combination([(self.scale, self.vector), (scale, vector)]))

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        stored = self.source.resolve_alias(name)
        if stored not in self._moved:
            return self.source.read(stored, rows)
        return compute_in_blocks(widen(self.source.spec(stored)), rows, lambda part: self._compute(stored, part))

    def _compute(self, stored: str, rows: Rows | None) -> Tensor:
        moved = self.vector.compute(self._moved[stored], rows)
        base = self.source.read(stored, rows).to(
            torch.promote_types(moved.dtype, widen(self.source.spec(stored)).dtype)
        )
        return torch.add(base, moved, alpha=self.scale)

    def fingerprint(self) -> str:
        parts = f"{self.source.fingerprint()} {self.scale!r} {self.vector.fingerprint()}"
        return hash_text(parts)

    def files(self) -> Sequence[Path]:
        return [*self.source.files(), *self.vector.files()]

    def lineage(self) -> Lineage:
        return Lineage(self.source.label, (self.vector.label,), ("task_arithmetic",))

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        super().prefetch(name, rows)
        if (stored := self.source.resolve_alias(name)) in self._moved:
            self.vector.prefetch(self._moved[stored], rows)


def _as_number(value: object) -> float | None:
    """Return a real number, also one in a tensor or an array without axes, as a float; None for anything else."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
