"""Vectors in weight space as lazy checkpoints: differences of checkpoints, and operations on them.

A vector has the floating tensors of its sources and is read in float32 (float64 where a source is). Every node is
elementwise and gives the same bits for any range of rows, except `TruncatedVector`, which decomposes whole matrices.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, hash_text, is_integer, row_blocks
from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.quantised import refuse_quantised
from merganser.checkpoints.recent import Recent
from merganser.errors import CheckpointError, InputError, did_you_mean
from merganser.kernels.selection import Cutoff, chosen, largest
from merganser.kernels.spectra import Factors, top_svd

T = TypeVar("T")
Condition = Callable[[str, Tensor, Tensor], Tensor]
_KEPT = 4


class Vector(Checkpoint):
    """A node with fixed specs of its tensors and a way to read rows of them.

    `settings` are its exact parameters, which its label may round. They and the class tell nodes on the same parts
    apart; the label does not count, because it has the paths of the parts.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        label: str,
        parts: Sequence[Checkpoint],
        settings: Sequence[float | str] = (),
    ) -> None:
        self.label = label
        self.parts = tuple(parts)
        self.settings = tuple(settings)
        self._specs = dict(specs)

    def names(self) -> Sequence[str]:
        return list(self._specs)

    def spec(self, name: str) -> TensorSpec:
        if name not in self._specs:
            raise self.missing(name)
        return self._specs[name]

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        return compute_in_blocks(self.spec(name), rows, lambda part: self.compute(name, part))

    @abstractmethod
    def compute(self, name: str, rows: Rows | None) -> Tensor:
        """Return these rows, in the dtype of the spec, as a fresh tensor."""

    def fingerprint(self) -> str:
        own = [type(self).__name__, *map(repr, self.settings)]
        text = " ".join([*own, *(part.fingerprint() for part in self.parts), *self._specs])
        return hash_text(text)

    def files(self) -> Sequence[Path]:
        return [path for part in self.parts for path in part.files()]

    def lineage(self) -> Lineage:
        return Lineage(models=(self.label,), methods=("task vector",))

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        for part in self.parts:
            if name in part:
                part.prefetch(name, rows)


class Difference(Vector):
    """Δ = θ − θ_0 over the floating tensors of the base."""

    def __init__(self, finetuned: Checkpoint, base: Checkpoint, exclude: Sequence[str] = ()) -> None:
        for checkpoint in (base, finetuned):
            refuse_quantised(checkpoint, exclude)
        specs = {name: widen(spec) for name in _list_floating(base, exclude) for spec in [base.spec(name)]}
        problems = [
            f"{finetuned.label} has no {name!r}{did_you_mean(name, finetuned.names())}"
            if name not in finetuned
            else f"{name!r} is {finetuned.spec(name)} in {finetuned.label} and {base.spec(name)} in {base.label}"
            for name, spec in specs.items()
            if name not in finetuned or finetuned.spec(name).shape != spec.shape
        ]
        extra = [name for name in _list_floating(finetuned, exclude) if name not in base]
        problems += [f"{finetuned.label} has {name!r}, which {base.label} does not have" for name in extra]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise CheckpointError(f"no task vector: {problems[0]}{more}; `exclude` leaves tensors out")
        for name, spec in specs.items():
            if finetuned.spec(name).dtype == torch.float64:
                specs[name] = TensorSpec(spec.shape, torch.float64)
        super().__init__(specs, f"{finetuned.label} − {base.label}", (finetuned, base))

    def compute(self, name: str, rows: Rows | None) -> Tensor:
        finetuned, base = (part.read(name, rows) for part in self.parts)
        dtype = self._specs[name].dtype
        return finetuned.to(dtype) - base.to(dtype)


class Stored(Vector):
    """A vector read from a checkpoint of differences, such as a saved task vector."""

    def __init__(self, source: Checkpoint, exclude: Sequence[str] = ()) -> None:
        refuse_quantised(source, exclude)
        super().__init__({n: widen(source.spec(n)) for n in _list_floating(source, exclude)}, source.label, (source,))

    def compute(self, name: str, rows: Rows | None) -> Tensor:
        return self.parts[0].read(name, rows).to(self._specs[name].dtype, copy=True)


class Combination(Vector):
    """Σ c_i v_i; a tensor that a vector lacks counts as zero.

    Nested sums are flattened and equal terms are combined, so that a + b − b equals a to the last bit.
    """

    def __init__(self, terms: Sequence[tuple[float, Vector]]) -> None:
        collected: dict[int, tuple[float, Vector]] = {}
        specs: dict[str, TensorSpec] = {}
        for coefficient, vector in terms:
            _unite(specs, vector)
            inner = vector.terms if isinstance(vector, Combination) else [(1.0, vector)]
            for c, v in inner:
                before = collected.get(id(v), (0.0, v))[0]
                collected[id(v)] = (before + coefficient * c, v)
        self.terms: list[tuple[float, Vector]] = [(c, v) for c, v in collected.values() if c != 0]
        if unsound := next((c for c, _ in self.terms if not math.isfinite(c)), None):
            raise InputError(f"a task vector cannot be multiplied by {unsound}")
        label = " + ".join(v.label if c == 1 else f"{c:g}·({v.label})" for c, v in self.terms) or "0"
        super().__init__(specs, label, [v for _, v in self.terms], [c for c, _ in self.terms])

    def compute(self, name: str, rows: Rows | None) -> Tensor:
        spec = self._specs[name]
        total: Tensor | None = None
        for coefficient, vector in self.terms:
            if name not in vector:
                continue
            tensor = vector.compute(name, rows)
            if total is None:
                total = tensor.to(spec.dtype).mul_(coefficient)
            else:
                total.add_(tensor, alpha=coefficient)
        return torch.zeros(_shape(spec, rows), dtype=spec.dtype, device="cpu") if total is None else total


class Restricted(Vector):
    """The tensors whose names match one of the globs, or those whose names match none."""

    def __init__(self, vector: Vector, globs: Sequence[str], keep: bool) -> None:
        chosen = {n: vector.spec(n) for n in vector.names() if any(fnmatchcase(n, g) for g in globs) == keep}
        if not chosen:
            raise InputError(f"{', '.join(globs)}: leaves no tensor of {vector.label}, e.g. {vector.names()[:1]}")
        super().__init__(chosen, f"{vector.label} {'in' if keep else 'without'} {','.join(globs)}", (vector,))
        self.vector = vector

    def compute(self, name: str, rows: Rows | None) -> Tensor:
        return self.vector.compute(name, rows)


class Masked(Vector):
    """v ⊙ m, with m a function of the name and the same rows of v and of `by`; zero in tensors that `by` lacks.

    `relation` names the function in the label, and in the fingerprint if there is a `by`.
    """

    def __init__(self, vector: Vector, condition: Condition, relation: str, by: Vector | None = None) -> None:
        specs = {n: vector.spec(n) for n in vector.names()}
        label = f"{vector.label} {relation} {by.label}" if by else f"{vector.label} {relation}"
        super().__init__(specs, label, (vector, *([by] if by else [])), [relation] if by else [])
        if by is not None:
            _unite(dict(specs), by)
        self.vector, self.by, self.condition = vector, by or vector, condition

    def compute(self, name: str, rows: Rows | None) -> Tensor:
        tensor = self.vector.compute(name, rows)
        if name not in self.by:
            return tensor.zero_()
        other = tensor if self.by is self.vector else self.by.compute(name, rows)
        kept = self.condition(name, tensor, other)
        if kept.shape != tensor.shape:
            raise InputError(f"the mask of {name!r} has shape {list(kept.shape)}, expected {list(tensor.shape)}")
        return tensor.masked_fill_(~kept.bool(), 0)

    def fingerprint(self) -> str:
        """Return the fingerprint. Without `by`, the condition may be any function, so its result is computed."""
        digest = hashlib.sha256(super().fingerprint().encode())
        if self.by is self.vector:
            for name, spec in self._specs.items():
                for rows in row_blocks(spec):
                    digest.update(self.compute(name, rows).numpy().tobytes())
        return digest.hexdigest()


class Largest(Vector):
    """The entries of each tensor where `by` (by default the vector itself) is largest in magnitude.

    Keeps exactly ⌊density · n⌋ entries, at least one unless the density is 0, and the first of equal ones. The
    threshold of a tensor is found by streaming over it at the first read.
    """

    def __init__(self, vector: Vector, density: float, by: Vector | None = None) -> None:
        if not 0 <= density <= 1:
            raise InputError(f"density must lie in [0, 1], got {density}")
        by = by or vector
        if lacking := next((name for name in vector.names() if name not in by), None):
            raise InputError(f"{by.label} has no {lacking!r} to choose entries by{did_you_mean(lacking, by.names())}")
        _unite({n: vector.spec(n) for n in vector.names()}, by)
        label = f"largest {density:g} of {vector.label} by {by.label}"
        super().__init__({n: vector.spec(n) for n in vector.names()}, label, (vector, by), [density])
        self.vector, self.by, self.density = vector, by, density
        self._cutoffs: Recent[Cutoff] = Recent()

    def compute(self, name: str, rows: Rows | None) -> Tensor:
        cutoff = self._cutoffs.get(name, lambda: self._cutoff(name))
        tensor = self.vector.compute(name, rows)
        scores = (tensor if self.by is self.vector else self.by.compute(name, rows)).abs().reshape(-1)
        offset = rows[0] * math.prod(tensor.shape[1:]) if rows else 0
        ties = min(max(cutoff.index - offset, 0), scores.numel())
        kept = scores > cutoff.value
        kept[:ties] |= scores[:ties] == cutoff.value
        return tensor.masked_fill_(~kept.view(tensor.shape), 0)

    def _cutoff(self, name: str) -> Cutoff:
        spec = self._specs[name]
        keep = min(spec.numel, max(1, int(self.density * spec.numel))) if self.density > 0 else 0
        ((cutoff,),) = largest(_Scores(self.by, name, spec), lambda block: [block], [[keep]], spec.numel)
        return cutoff


class TruncatedVector(Vector):
    """Matrices truncated to their leading singular components. Tensors with more axes are matrices of their first
    axis; vectors are unchanged. `rank` is a number of components, or as a float of at most 1 a share of them.
    """

    def __init__(self, vector: Vector, rank: int | float) -> None:
        number = isinstance(rank, int | float) and not isinstance(rank, bool)
        if not number or not 0 < rank < math.inf or (rank > 1 and rank != int(rank)):
            raise InputError(f"a rank is a whole number, or a share between 0 and 1; got {rank}")
        label = f"{vector.label} at rank {rank:g}"
        super().__init__({n: vector.spec(n) for n in vector.names()}, label, (vector,), [rank])
        self.vector, self.rank = vector, rank
        self._factors: Recent[Factors] = Recent(_KEPT)

    def compute(self, name: str, rows: Rows | None) -> Tensor:
        spec = self._specs[name]
        if len(spec.shape) < 2 or min(spec.shape[0], math.prod(spec.shape[1:])) < 2:
            return self.vector.compute(name, rows)
        u, s, v = self._factors.get(name, lambda: self._decompose(name))
        part = u if rows is None else u[rows[0] : rows[1]]
        return ((part * s) @ v.T).to(spec.dtype).view(_shape(spec, rows))

    def _decompose(self, name: str) -> Factors:
        matrix = self.vector.read(name).flatten(1)
        n = min(matrix.shape)
        share = isinstance(self.rank, float) and self.rank <= 1
        return top_svd(matrix, min(n, max(1, math.ceil(self.rank * n)) if share else int(self.rank)))


class _Scores:
    """Magnitudes of one tensor in blocks, as `kernels.selection` streams them."""

    def __init__(self, vector: Vector, name: str, spec: TensorSpec) -> None:
        self._vector, self._name = vector, name
        self._rows = list(row_blocks(spec))

    def map(self, function: Callable[[Tensor], T], only: int | None = None, stride: int = 1) -> list[T]:
        rows = [self._rows[index] for index in chosen(len(self._rows), only, stride)]
        return [function(self._vector.compute(self._name, each).abs_()) for each in rows]


def widen(spec: TensorSpec) -> TensorSpec:
    """Return the spec of a difference: at least float32."""
    return TensorSpec(spec.shape, torch.float64 if spec.dtype == torch.float64 else torch.float32)


def compute_in_blocks(spec: TensorSpec, rows: Rows | None, compute: Callable[[Rows | None], Tensor]) -> Tensor:
    """Apply `compute` to blocks of rows, which stay in cache, and join the results. A single number is one block."""
    blocks = list(row_blocks(spec, rows))
    if len(blocks) == 1:
        return compute(blocks[0])
    whole: Tensor | None = None
    shape, done = _shape(spec, rows), 0
    for block in blocks:
        part = compute(block)
        if whole is None:
            whole = torch.empty(shape, dtype=part.dtype, device="cpu")
        whole[done : done + len(part)] = part
        done += len(part)
    return torch.empty(shape, dtype=spec.dtype, device="cpu") if whole is None else whole


def _shape(spec: TensorSpec, rows: Rows | None) -> tuple[int, ...]:
    return (rows[1] - rows[0], *spec.shape[1:]) if rows is not None and spec.shape else spec.shape


def _list_floating(checkpoint: Checkpoint, exclude: Sequence[str] = ()) -> list[str]:
    names = [
        name
        for name in checkpoint.names()
        if not is_integer(checkpoint.spec(name).dtype) and not any(fnmatchcase(name, glob) for glob in exclude)
    ]
    if found := next((name for name in names if checkpoint.spec(name).dtype.is_complex), None):
        raise CheckpointError(
            f"no task vector: {found!r} of {checkpoint.label} is {checkpoint.spec(found)}, but vectors are real; "
            "`exclude` leaves tensors out"
        )
    return names


def _unite(specs: dict[str, TensorSpec], vector: Vector) -> None:
    """Add the specs of another vector to `specs`, with the wider dtype if both have a tensor."""
    for name in vector.names():
        found, known = vector.spec(name), specs.get(name)
        if known is not None and known.shape != found.shape:
            raise CheckpointError(f"{name!r} is {found} in {vector.label} and {known} in another term")
        specs[name] = found if known is None or found.dtype == torch.float64 else known
