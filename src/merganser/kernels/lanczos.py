"""Leading eigenpairs of a large Gram matrix by block Lanczos iteration.

For a small share of the spectrum, products with blocks of vectors take a fraction of the time of LAPACK, which reduces
the whole matrix to tridiagonal form first and reads it once per column. From random X_0 on, blocks follow as

    Z = G X_j − Q Qᵀ G X_j,   X_{j+1} S_j = Z (QR),

where Q = [X_0 … X_j] is kept orthonormal in full. The eigenpairs (λ, y) of H = QᵀGQ then give those of G with a
residual that needs no further product, ‖G Q y − λ Q y‖ = ‖S_j y_j‖, y_j the last b entries of y. H is small and
decomposed in float64: in float32, LAPACK's eigenvectors of H are either orthogonal to three digits only or inaccurate
where λ is small.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from merganser.kernels.spectra import product
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Largest share of the eigenpairs that products find faster than a reduction.
SHARE = 1 / 8
#: Sizes of the basis, relative to the number of eigenpairs, at which the error is estimated.
SIZES = (2.8, 3.2, 3.8)
#: An error at the first sizes beyond which the last would not suffice.
HOPELESS = 0.05
#: Largest residual of an eigenpair, relative to its eigenvalue, that shows that no other one was missed.
SETTLED = 0.1
#: Power steps that look for missing eigenvalues, and how much larger than the last one they must be.
POWER_STEPS, CLEARLY = 2, 1.2
#: Columns of which projecting leaves less than this share of their block, or less than the second share of the first
#: block, are not orthogonal to the basis yet.
_SMALL, _ROUNDING = 1e-2, 1e-4
#: Widths of blocks are multiples of this; BLAS takes up to three times as long for a column of other blocks.
_WIDTH = 16


def leading_eigenpairs(gram: Tensor, count: int, k: int, error: float, floor: float) -> tuple[Tensor, Tensor] | None:
    """Return the `count` largest eigenvalues of G = AᵀA, descending, with their vectors as columns.

    Args:
        gram: G, both triangles.
        count: The number of eigenpairs, greater than k: the last eigenvalue bounds those that are not in the basis.
        k: The number of eigenpairs that count for the error.
        error: The error of the truncated A (see `merganser.kernels.leading`) that ends the iteration, estimated.
        floor: Share of the largest eigenvalue; if the last one falls below it, the iteration ends as well.

    Returns:
        The eigenpairs, or None if the error is not reached because the eigenvalues lie too close, or some are missing.

    Example:
        >>> leading_eigenpairs(torch.diag(2.0 ** -torch.arange(64)), 12, 2, 1e-3, 1e-4)[0][:3]
        tensor([1.0000, 0.5000, 0.2500])
    """
    from merganser.kernels.lapack import leading_eigenpairs as dense_eigenpairs

    n, width = gram.shape[0], _WIDTH * max(1, k // (16 * _WIDTH))
    sizes = [math.ceil(size * count / width) * width for size in SIZES]
    basis, projected = gram.new_empty(sizes[-1] + width, n), gram.new_zeros(sizes[-1], sizes[-1])
    start = torch.randn(n, width, generator=torch.Generator().manual_seed(0)).to(gram)
    block = torch.linalg.qr(start).Q.contiguous()
    basis[:width] = block.T
    done, first = 0, 0.0
    for size in sizes:
        for old in range(done, size, width):
            new = old + width
            image = product(gram, block)
            largest = float(torch.linalg.vector_norm(image, dim=0).max())
            first = first or largest
            _project(image, basis[max(0, old - width) : new], projected[old:new, max(0, old - width) : new])
            _project(image, basis[:new], projected[old:new, :new])
            block, coupling = torch.linalg.qr(image)
            if float(coupling.diagonal().abs().min()) <= max(_SMALL * largest, _ROUNDING * first):
                _project(block, basis[:new])
                block = torch.linalg.qr(block).Q
            block = block.contiguous()
            basis[new : new + width] = block.T
        pairs = dense_eigenpairs(projected[:size, :size].double(), size, overwrite=True)
        values, rotation = pairs[0][:count].float(), pairs[1][:, :count].float()
        residuals = torch.linalg.vector_norm(coupling @ rotation[-width:], dim=0)
        found = _truncation_error(values, residuals, k)
        settled = found <= error and bool((residuals <= SETTLED * values).all())
        low = bool(values[-1] <= floor * values[0])
        if settled or low:
            vectors = product(rotation.T, basis[:size]).T
            return (values, vectors) if low or _finds_all(gram, values, vectors) else None
        if not found <= HOPELESS:
            return None
        done = size
    return None


def _finds_all(gram: Tensor, values: Tensor, vectors: Tensor) -> bool:
    """Return whether power steps in the complement of the vectors reach no eigenvalue clearly above the last.

    A block of b columns finds at most b of equal eigenvalues, with residuals that show nothing.
    """
    columns = torch.randn(len(gram), _WIDTH, generator=torch.Generator().manual_seed(1)).to(gram)
    for _ in range(POWER_STEPS):
        _project(columns, vectors.T)
        columns = product(gram, columns / torch.linalg.vector_norm(columns, dim=0))
    return bool((torch.linalg.vector_norm(columns, dim=0) <= CLEARLY * values[-1]).all())


def _project(columns: Tensor, rows: Tensor, sums: Tensor | None = None) -> None:
    """Remove the span of orthonormal rows from columns; add the transposed coefficients to `sums`."""
    coefficients = product(rows, columns)
    product(rows.T, coefficients, columns, scale=-1.0)
    if sums is not None:
        sums += coefficients.T


def _truncation_error(values: Tensor, residuals: Tensor, k: int) -> float:
    """Return ‖R D‖ / ‖Σ_k‖ of `merganser.kernels.leading` from the residuals σ R of the Gram matrix."""
    squares = values.double()
    gaps = squares[:k] - squares[-1]
    if not bool((gaps > 0).all()):
        return math.inf
    return float((residuals[:k] * squares[:k].sqrt() / gaps).norm() / squares[:k].sum().sqrt())
