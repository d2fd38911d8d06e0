"""Spectra of task matrices: Gram matrices, top-k SVD, singular values.

Everything is computed in float64 from the Gram matrix of the short side, which is several times faster than an SVD and
streams over the rows of the long side, so that a matrix the size of a vocabulary is not copied. A Gram matrix squares
the spectrum: singular values below 1e-3·σ₁ would lose their digits, so `top_svd` resolves them in further passes over
the deflated matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from merganser.errors import MerganserError
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

#: One pass over a Gram matrix resolves singular values down to this share of the largest.
RESOLVED = 1e-3
#: Components below this share of σ₁ are float64 rounding and are not returned.
RANK_FLOOR = 1e-12
#: Below this side a float64 SVD is as fast and needs no second pass.
SMALL = 32
_BLOCK_ELEMENTS = 1 << 20
_SIDE = 256
#: Matrices of up to this many entries are held in float64 while they are decomposed; larger ones are streamed.
HELD = 1 << 23


class Factors(NamedTuple):
    """A matrix as u · diag(s) · vᵀ, s descending; u and v have orthonormal columns."""

    u: Tensor
    s: Tensor
    v: Tensor

    @property
    def rank(self) -> int:
        return self.s.numel()

    @property
    def T(self) -> Factors:
        return Factors(self.v, self.s, self.u)

    def truncate(self, k: int) -> Factors:
        return Factors(self.u[:, :k], self.s[:k], self.v[:, :k])

    def above(self, floor: float) -> Factors:
        """Return the factors without components below `floor` · σ₁."""
        return self.truncate(int((self.s > floor * self.s[0]).sum()) if self.rank else 0)

    def matrix(self) -> Tensor:
        return (self.u * self.s) @ self.v.T


def top_svd(matrix: Tensor, k: int) -> Factors:
    """Return the k leading singular triplets in float64; fewer if the rank is smaller, none for a zero matrix.

    Equal to `numpy.linalg.svd` of the float64 matrix to a backward error of about 1e-12·σ₁, with factors
    orthonormal to about 1e-10, or to 1e-15·σ₁/σ_k if that is larger. Components below `RANK_FLOOR`·σ₁ are left out:
    their directions are arbitrary.
    """
    if matrix.shape[0] < matrix.shape[1]:
        return top_svd(matrix.T, k).T
    k = min(k, matrix.shape[1])
    if matrix.shape[1] <= SMALL:
        return _direct(matrix.double().unsqueeze(0), k)[0]
    return _by_gram(matrix, k)


def spectrum_and_svd(matrix: Tensor, k: int) -> tuple[Tensor, Factors]:
    """Return `spectrum` and `top_svd` of a matrix, from one Gram matrix and one decomposition of it."""
    if matrix.shape[0] < matrix.shape[1]:
        values, factors = spectrum_and_svd(matrix.T, k)
        return values, factors.T
    k = min(k, matrix.shape[1])
    if matrix.shape[1] <= SMALL:
        whole = _direct(matrix.double().unsqueeze(0), matrix.shape[1])[0]
        missing = matrix.shape[1] - whole.rank
        return torch.nn.functional.pad(whole.s, (0, missing)), whole.truncate(k)
    held = matrix.to(torch.float64) if matrix.numel() <= HELD else matrix
    squares, vectors = _eigenvalues_and_leading_vectors(gram(held), k)
    return squares.clamp(min=0).sqrt(), _by_gram(held, k, (squares[:k], vectors))


def top_svds(matrices: Sequence[Tensor], k: int) -> list[Factors]:
    """Return `top_svd` of each; small matrices of one shape use one batched call."""
    first = matrices[0]
    if min(first.shape) <= SMALL and all(m.shape == first.shape for m in matrices):
        return _direct(torch.stack([m.double() for m in matrices]), min(k, *first.shape))
    return [top_svd(matrix, k) for matrix in matrices]


def _direct(stack: Tensor, k: int) -> list[Factors]:
    _assert_finite(stack)
    u, s, vh = torch.linalg.svd(stack, full_matrices=False)
    full = (Factors(ui[:, :k], si[:k], vi[:k].T) for ui, si, vi in zip(u, s, vh, strict=True))
    return [f.above(RANK_FLOOR) for f in full]


def _by_gram(matrix: Tensor, k: int, first: tuple[Tensor, Tensor] | None = None) -> Factors:
    """Make Gram passes over the tall matrix; each takes the components within `RESOLVED` of the remainder. `first`
    are the leading eigenpairs of its Gram matrix, if known.
    """
    d, m = matrix.shape
    if matrix.numel() <= HELD:  # converted only once
        matrix = matrix.to(torch.float64)
    u, s, v = (matrix.new_empty(shape, dtype=torch.float64) for shape in ((d, 0), (0,), (m, 0)))
    while s.numel() < k:
        values, w = first or leading_eigenpairs(gram(matrix, without=v), k - s.numel())
        first = None
        scale = values.clamp(min=0).sqrt()
        if scale[0] <= RANK_FLOOR * (s[0] if s.numel() else 0.0):
            break
        w = w[:, scale > RESOLVED * scale[0]]
        w = w - v @ (v.T @ w)
        image = times(matrix, w)
        image -= u @ (u.T @ image)
        sigma = torch.linalg.vector_norm(image, dim=0)
        image /= sigma
        if bool((sigma.diff() > 0).any()):
            order = sigma.argsort(descending=True)
            image, w, sigma = image[:, order], w[:, order], sigma[order]
        u, s, v = beside(u, image), torch.cat([s, sigma]), beside(v, w)
    return Factors(u, s, v).above(RANK_FLOOR)


def beside(*parts: Tensor) -> Tensor:
    """Concatenate matrices horizontally; contiguous columns, as those of factors, stay contiguous.

    Parts that lie side by side in memory are not copied.
    """
    first, rows = parts[0], parts[0].shape[0]
    place = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.dtype == first.dtype
        if not same or part.stride() != (1, rows) or part.storage_offset() != place:
            return torch.cat([part.T for part in parts]).T
        place += part.numel()
    return first.as_strided((rows, sum(part.shape[1] for part in parts)), (1, rows))


def gram(matrix: Tensor, without: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return AᵀA in `dtype` (float64), streamed over rows; only the lower triangle is filled.

    `without` has orthonormal columns W: the result is then the Gram matrix of A (I − W Wᵀ).
    """
    from merganser.kernels.lapack import add_gram  # scipy is slow to import, and most merges do not need it

    m = matrix.shape[1]
    total = torch.zeros(m, m, dtype=dtype or torch.float64, device=matrix.device)
    for _, rows in _row_blocks(matrix, total.dtype) if m else ():
        if without is not None and without.shape[1]:
            rows = rows - (rows @ without) @ without.T
        if matrix.device.type == "cpu":
            add_gram(rows, total)
        else:
            total.addmm_(rows.T, rows)
    _assert_finite(total.diagonal())  # sums of squares: they show what is not finite anywhere
    return total


def product(left: Tensor, right: Tensor, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Return left · right, or add `scale` times it to `out`, which is contiguous.

    In float32 on one thread of the CPU, as in a merge, it is computed by scipy's BLAS: torch's does not use the wide
    registers of AMD processors, which halves its speed.
    """
    if left.dtype == torch.float32 and left.device.type == "cpu" and torch.get_num_threads() == 1:
        from merganser.kernels.lapack import multiply

        return multiply(left, right, out, scale)
    return left @ right if out is None else out.addmm_(left, right, alpha=scale)


def mirror(lower: Tensor) -> Tensor:
    """Copy the lower triangle of a square matrix to the upper, in place, and return the matrix."""
    n = lower.shape[0]
    for start in range(0, n, _SIDE):
        stop = min(start + _SIDE, n)
        corner = lower[start:stop, start:stop]
        corner.copy_(corner.tril() + corner.tril(-1).T)
        lower[start:stop, stop:] = lower[stop:, start:stop].T
    return lower


def spectrum(matrix: Tensor) -> Tensor:
    """Return all singular values, descending, to an absolute accuracy of 1e-8·σ₁."""
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T
    if matrix.shape[1] <= SMALL:
        _assert_finite(matrix)
        values: Tensor = torch.linalg.svdvals(matrix.double())
        return values
    squares: Tensor = torch.linalg.eigvalsh(gram(matrix))
    return squares.flip(0).clamp(min=0).sqrt()


def effective_rank(s: Tensor) -> float:
    """Return exp of the entropy of σ / Σσ: n for a flat spectrum, 1 for a single direction, 0 for a zero matrix."""
    if s.numel() == 0 or not s[0] > 0:
        return 0.0
    p = s[s > 0] / s.sum()
    return float(torch.exp(-(p * p.log()).sum()))


def randomized_svd(matrix: Tensor, k: int, *, seed: int = 0, oversample: int = 16, passes: int = 2) -> Factors:
    """Return approximately the k leading triplets by subspace iteration; for compression only.

    The energy kept is within a percent of the optimum, but the factors differ from those of `top_svd`: if factors of
    several matrices are orthogonalised together, the difference is amplified to tens of percent.
    """
    if matrix.shape[0] < matrix.shape[1]:
        return randomized_svd(matrix.T, k, seed=seed, oversample=oversample, passes=passes).T
    width = min(k + oversample, matrix.shape[1])
    sample = np.random.Generator(np.random.PCG64(seed)).standard_normal((matrix.shape[1], width))
    basis = torch.from_numpy(sample).to(matrix.device)
    for _ in range(passes):
        basis = torch.linalg.qr(transpose_times(matrix, times(matrix, basis))).Q
    left = torch.linalg.qr(times(matrix, basis)).Q
    small = top_svd(transpose_times(matrix, left).T, k)
    return Factors(left @ small.u, small.s, small.v)


def leading_eigenpairs(symmetric: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest eigenvalues, descending, with their vectors, from the lower triangle, which is destroyed."""
    from merganser.kernels import lapack

    n = symmetric.shape[0]
    if n == 0:
        return symmetric.new_empty(0), symmetric
    if symmetric.device.type != "cpu":
        values, vectors = torch.linalg.eigh(symmetric)
        return values.flip(0)[:k], vectors.flip(1)[:, :k]
    return lapack.leading_eigenpairs(symmetric, k, overwrite=True)


def _eigenvalues_and_leading_vectors(symmetric: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return all eigenvalues, descending, with the vectors of the k largest, from the lower triangle, which is
    destroyed.
    """
    from merganser.kernels.lapack import eigenvalues_and_leading_vectors

    if symmetric.device.type != "cpu":
        values, vectors = torch.linalg.eigh(symmetric)
        return values.flip(0), vectors.flip(1)[:, :k]
    return eigenvalues_and_leading_vectors(symmetric, k, overwrite=True)


def _row_blocks(matrix: Tensor, dtype: torch.dtype | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows in `dtype` (float64) with contiguous rows or columns; one block if it stays float32."""
    dtype = dtype or torch.float64
    whole = matrix.dtype == dtype == torch.float32 and 1 in matrix.stride()
    step = max(1, matrix.shape[0] if whole else _BLOCK_ELEMENTS // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], step):
        rows = slice(start, min(start + step, matrix.shape[0]))
        block = matrix[rows].to(dtype)
        (height, width), (down, across) = block.shape, block.stride()
        dense = (across == 1 and down >= width) or (down == 1 and across >= height)
        yield rows, block if dense else block.contiguous()


def times(matrix: Tensor, right: Tensor) -> Tensor:
    """Return A · B in float64, streamed over the rows of A, with contiguous columns.

    Computed as the transpose of Bᵀ · Aᵀ, which takes MKL two thirds of the time if B is narrow.
    """
    out = torch.empty(right.shape[1], matrix.shape[0], dtype=torch.float64, device=matrix.device)
    for rows, block in _row_blocks(matrix):
        torch.matmul(right.T, block.T, out=out[:, rows])
    return out.T


def transpose_times(matrix: Tensor, left: Tensor) -> Tensor:
    """Return Aᵀ · B in float64, streamed over the rows of A."""
    out = torch.zeros(matrix.shape[1], left.shape[1], dtype=torch.float64, device=matrix.device)
    for rows, block in _row_blocks(matrix):
        out.addmm_(block.T, left[rows])
    return out


def _assert_finite(tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise MerganserError("cannot decompose a matrix with infinite or undefined entries")
