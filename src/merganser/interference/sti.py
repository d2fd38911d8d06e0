"""Singular task interference and related measures, on the factors of one matrix from several tasks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from merganser.kernels.lapack import eigenvalues_and_leading_vectors
from merganser.kernels.polar import TOLERANCE, noise_levels, passband
from merganser.kernels.spectra import Factors, times

#: Number of directions of float32 factors that are recomputed in float64 if their Gram matrix does not resolve them.
WEAKEST = 64
#: Share of the largest eigenvalue below which those of a float32 Gram matrix are noise.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Overlap:
    """The Gram matrices UᵀU and VᵀV of concatenated factors; `sizes` are the ranks of the tasks. `narrow` has
    float32 factors, for directions that their Gram matrices do not resolve.
    """

    left: Tensor
    right: Tensor
    s: Tensor
    sizes: tuple[int, ...]
    shape: tuple[int, int]
    orthonormal: bool = False
    narrow: tuple[Factors, ...] = ()

    @classmethod
    def of(cls, factors: Sequence[Factors], orthonormal: bool = False) -> Overlap:
        """Return the overlap of factors, in float32 if all of them are. Diagonal blocks of `orthonormal` factors are
        assumed to be the identity; stored factors are rounded, so theirs are computed.
        """
        narrow = tuple(factors) if all(f.s.dtype == torch.float32 for f in factors) else ()
        wide = torch.float32 if narrow else torch.float64
        us, ss, vs = ([part.to(wide) for part in parts] for parts in zip(*factors, strict=True))
        shape = (us[0].shape[0], vs[0].shape[0])
        left, right = (_block_gram(side, orthonormal) for side in (us, vs))
        return cls(left, right, torch.cat(ss), tuple(f.rank for f in factors), shape, orthonormal, narrow)

    def interference(self) -> float:
        """Return STI = ‖(UᵀU − I) Σ (VᵀV − I)‖₁, entrywise."""
        return float(self._deviation.abs().sum(dtype=torch.float64))

    def normalized(self) -> float:
        """Return ‖(UᵀU − I) Σ (VᵀV − I)‖ / (c_T ‖Σ‖), Frobenius: 0 for orthogonal tasks, 1 for identical ones.

        c_T² = (T − 1)(T² − 3T + 3). The entrywise norm of STI is unsuitable: it adds up the many tiny overlaps of
        unrelated tasks, so that identical tasks do not stand out.
        """
        size = float(self.s.norm())
        if len(self.sizes) < 2 or size == 0:
            return 0.0
        return float(self._deviation.norm()) / (size * _value_of_identical(len(self.sizes)))

    def chance(self) -> float:
        """Return the expected `normalized` value of unrelated tasks, with singular vectors uniform on their spheres.

        Entry (i, j) then is a sum over the components l of the other tasks of σ_l times two cosines of variance
        1/d and 1/m, so that its expected square is Σ_l σ_l² / (d·m).
        """
        energy = [float(part.square().sum()) for part in _parts(self.s, self.sizes)]
        total = sum(energy)
        if len(self.sizes) < 2 or total == 0:
            return 0.0
        expected = 0.0
        for a, rows in enumerate(self.sizes):
            for b, columns in enumerate(self.sizes):
                expected += rows * columns * (total - energy[a] - (energy[b] if a != b else 0.0))
        squares = expected / (self.shape[0] * self.shape[1] * total)
        return math.sqrt(max(0.0, squares)) / _value_of_identical(len(self.sizes))

    def pairs(self) -> Tensor:
        """Return the normalised interference of every pair of tasks, as a symmetric matrix."""
        tasks = len(self.sizes)
        table = torch.zeros(tasks, tasks, dtype=torch.float64)
        for a in range(tasks):
            for b in range(a):
                table[a, b] = table[b, a] = self._compare_two(a, b)
        return table

    def inner_products(self) -> Tensor:
        """Return ⟨Δ_a, Δ_b⟩ of the factored task matrices."""
        s = self.s.double()
        weighted = self.left * self.right * s[:, None] * s
        rows = torch.stack([part.sum(dim=0) for part in _parts(weighted, self.sizes)])
        return torch.stack([part.sum(dim=1) for part in _parts(rows, self.sizes, 1)], dim=1)

    @cached_property
    def _deviation(self) -> Tensor:
        return deviation(self.left, self.s, self.right)

    @cached_property
    def _squares(self) -> tuple[Tensor, Tensor]:
        """Return the squared singular values of U and of V, ascending."""
        left, right = (
            _square_spectrum(side, [f[2 * i] for f in self.narrow]) for i, side in enumerate((self.left, self.right))
        )
        return left, right

    def after_merging(self, tolerance: float = TOLERANCE) -> float:
        """Return the STI of the orthogonalised factors, U⊥ᵀU⊥ and V⊥ᵀV⊥: zero if T·k directions fit into the space."""
        kept = [_measure_kept(squares, d, tolerance) for squares, d in zip(self._squares, self.shape, strict=True)]
        if any(side.numel() and bool((side == 1).all()) for side in kept):
            return 0.0
        if self.narrow:
            return Overlap.of([f._replace(s=f.s.double()) for f in self.narrow]).after_merging(tolerance)
        left, right = (_polar_gram(*side, tolerance) for side in zip((self.left, self.right), self.shape, strict=True))
        return sti(left, self.s, right)

    def procrustes(self) -> tuple[float, float]:
        """Return ‖U − U⊥‖ and ‖V − V⊥‖ for the orthogonal Procrustes solutions, relative to ‖U‖ = ‖V‖ = √(Tk)."""
        left, right = (_procrustes_error(*side) for side in zip(self._squares, self.shape, strict=True))
        size = math.sqrt(max(1, self.s.numel()))
        return left / size, right / size

    def _compare_two(self, a: int, b: int) -> float:
        """Return the normalised interference of two tasks: for orthonormal factors, (UᵀU − I) has only two blocks."""
        if not self.orthonormal:
            return self._restrict(a, b).normalized()
        x, y = (_parts(_parts(side, self.sizes)[a], self.sizes, 1)[b] for side in (self.left, self.right))
        s, t = (_parts(self.s, self.sizes)[task] for task in (a, b))
        size = math.hypot(s.norm(), t.norm())
        return math.hypot(((x * t) @ y.T).norm(), ((x.T * s) @ y).norm()) / size if size else 0.0

    def _restrict(self, a: int, b: int) -> Overlap:
        starts = [sum(self.sizes[:task]) for task in (b, a)]
        keep = torch.cat([torch.arange(start, start + self.sizes[t]) for start, t in zip(starts, (b, a), strict=True)])
        part = (self.sizes[b], self.sizes[a])
        return Overlap(self.left[keep][:, keep], self.right[keep][:, keep], self.s[keep], part, self.shape)


def sti(left: Tensor, s: Tensor, right: Tensor) -> float:
    """Return ‖(L − I) Σ (R − I)‖₁."""
    return float(deviation(left, s, right).abs().sum())


def deviation(left: Tensor, s: Tensor, right: Tensor) -> Tensor:
    """Return (L − I) Σ (R − I)."""
    a, b = left.clone(), right.clone()
    a.diagonal().sub_(1)
    b.diagonal().sub_(1)
    return (a * s) @ b


def _value_of_identical(tasks: int) -> float:
    """Return c_T, the value for T identical tasks, where (J − I)² = (T − 2) J + I."""
    return math.sqrt((tasks - 1) * (tasks * tasks - 3 * tasks + 3))


def square_procrustes(n: int, tasks: int) -> float:
    """Return the relative Procrustes error of any T orthogonal n×n bases: U Uᵀ = T·I, error √n (√T − 1)."""
    return math.sqrt(n) * (math.sqrt(tasks) - 1) / math.sqrt(n * tasks)


def full_rank_procrustes(bases: Sequence[Tensor]) -> float:
    """Return the relative Procrustes error of concatenated whole bases, from the smaller of the two Gram matrices."""
    d, columns = bases[0].shape[0], sum(basis.shape[1] for basis in bases)
    if columns <= d:
        u = torch.cat([basis.double() for basis in bases], dim=1)
        gram = u.T @ u
    else:
        gram = torch.zeros(d, d, dtype=torch.float64)
        for basis in bases:
            gram.addmm_(basis.double(), basis.double().T)
    return _procrustes_error(torch.linalg.eigvalsh(gram), min(d, columns)) / math.sqrt(max(1, columns))


def _procrustes_error(squares: Tensor, dimension: int) -> float:
    """Return √Σ(σ − 1)² over the singular values that a matrix with this many rows can have."""
    values = squares.double().flip(0)[:dimension].clamp(min=0).sqrt()
    return float((values - 1).norm())


def _block_gram(parts: Sequence[Tensor], orthonormal: bool) -> Tensor:
    """Return [A₁ A₂ …]ᵀ[A₁ A₂ …], computing each block above the diagonal once, and diagonal blocks only if unknown."""
    sizes = [part.shape[1] for part in parts]
    total = parts[0].new_empty(sum(sizes), sum(sizes))
    starts = list(itertools.accumulate(sizes, initial=0))
    for a, b in itertools.combinations_with_replacement(range(len(parts)), 2):
        block = torch.eye(sizes[a]) if a == b and orthonormal else parts[a].T @ parts[b]
        rows, columns = slice(starts[a], starts[a + 1]), slice(starts[b], starts[b + 1])
        total[rows, columns] = block
        total[columns, rows] = block.T
    return total


def _square_spectrum(gram: Tensor, narrow: Sequence[Tensor]) -> Tensor:
    """Return the eigenvalues of a Gram matrix, ascending. In float32 the smallest are noise: if they are few, they
    are recomputed in float64 from the factors and their eigenvectors; otherwise all of them count as 0.
    """
    if not narrow:
        exact: Tensor = torch.linalg.eigvalsh(gram)
        return exact
    values, vectors = eigenvalues_and_leading_vectors(-gram, min(WEAKEST, len(gram)))
    squares = values.neg().double()
    weak = int((squares < ROUNDING * squares[-1]).sum())
    squares[:weak] = 0
    if 0 < weak < WEAKEST:
        pieces = torch.split(vectors[:, :weak].double(), [part.shape[1] for part in narrow])
        image = torch.stack([times(*pair) for pair in zip(narrow, pieces, strict=True)]).sum(dim=0)
        squares[:weak] = torch.linalg.eigvalsh(image.T @ image)
    return squares


def _polar_gram(gram: Tensor, rows: int, tolerance: float) -> Tensor:
    values, w = torch.linalg.eigh(gram)
    kept = _measure_kept(values, rows, tolerance)
    product: Tensor = (w * kept.square()) @ w.T
    return product


def _measure_kept(squares: Tensor, rows: int, tolerance: float) -> Tensor:
    """Return how much of every direction the filtered polar factor keeps."""
    if squares.numel() == 0:
        return squares
    x = (squares.clamp(min=0) / squares[-1].clamp(min=1e-300)).sqrt()
    return passband(x, noise_levels(x, rows, tolerance))


def _parts(tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    starts = itertools.accumulate(sizes, initial=0)
    return [tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]
