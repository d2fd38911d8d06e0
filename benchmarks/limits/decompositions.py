"""The products and eigenvectors that TSV-Merge cannot do without, and nothing else: the limit of its processor time.

Every route that is as accurate computes a Gram matrix of each of T task matrices of d × n, d ≥ n, its n/T leading
eigenvectors and their image; the Gram matrices of both concatenations, all eigenvectors of these, and their roots; and
the result. One of each is timed, in float32, by the same routines that a merge calls. Differences, corrections,
measured errors and copies are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from merganser.kernels import lanczos, lapack
from merganser.kernels.leading import ERROR, RESOLVED, with_margin
from merganser.kernels.spectra import gram, mirror, product


def tsv(delta: Tensor, tasks: int) -> dict[str, float]:
    """Return the processor seconds of the products and of the eigenvectors for `tasks` matrices like `delta`."""
    a = delta if delta.shape[0] >= delta.shape[1] else delta.T
    n = a.shape[1]
    k = n // tasks
    own_gram, square = used(lambda: gram(a, dtype=a.dtype))
    own_vectors, basis = used(lambda: leading_vectors(mirror(square), k))
    image, _ = used(lambda: product(basis[:, :k].T, a.T))
    # Like the shorter concatenation: columns of length one, of which few are nearly dependent.
    short = torch.randn(n, n, generator=torch.Generator().manual_seed(0)) / n**0.5
    short_gram, square = used(lambda: gram(short, dtype=a.dtype))
    all_vectors, (_, vectors) = used(lambda: lapack.leading_eigenpairs(square, n))
    short_product, _ = used(lambda: product(short, vectors))
    result, _ = used(lambda: product(a, vectors))
    # Gram matrices of both concatenations and their two roots; the shorter polar factor, and the roots times it.
    concatenated = own_gram + 3 * short_gram + 2 * short_product
    return {
        "products": tasks * (own_gram + image) + concatenated + result,
        "eigenvectors": tasks * own_vectors + 2 * all_vectors,
    }


def leading_vectors(square: Tensor, k: int) -> Tensor:
    """Return the k leading eigenvectors of a Gram matrix, and a few more, the way that `leading_svd` does."""
    count = with_margin(k) + 1
    found = None
    if k <= lanczos.SHARE * len(square):
        found = lanczos.leading_eigenpairs(square, count, k, ERROR, RESOLVED)
    return (found or lapack.leading_eigenpairs(square, count))[1]


def used(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the lesser processor seconds of two runs, and the result."""
    least, result = float("inf"), None
    for _ in range(2):
        began = time.process_time()
        result = function()
        least = min(least, time.process_time() - began)
    return least, result
