"""Averages on a sphere, computed in the span of the points.

Great-circle interpolation, barycentres and Karcher means are linear combinations Σ c_i x_i of the given vectors, and
their coefficients depend on the vectors only through the Gram matrix G_ij = ⟨x_i, x_j⟩. One pass over the data computes
G; everything else happens in a space with as many dimensions as there are vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from merganser.kernels.arrays import Reals
from merganser.kernels.recording import Lane
from merganser.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor


#: Vectors with a larger |cosine| count as parallel and are interpolated linearly.
PARALLEL = 0.9995
_RUN = 1024


def total(values: Tensor) -> float:
    """Return the sum in float64, from runs of fixed length, so that the number of threads changes no bit."""
    if isinstance(values, Lane):
        return values.recording.end("SUM", lambda number, results: results.total(number), values)
    flat = values.reshape(-1)
    whole = flat.numel() // _RUN * _RUN
    runs = sums(flat[:whole].view(-1, _RUN), 1)
    return math.fsum(runs.tolist()) + float(sums(flat[whole:], 0))


def nonzero(values: Tensor) -> int:
    """Return the number of nonzero entries."""
    if isinstance(values, Lane):
        return values.recording.end("NONZERO", lambda number, found: int(found.counts[number, 0]), values)
    return int(torch.count_nonzero(values))


def sums(values: Tensor, axis: int, keepdim: bool = False) -> Tensor:
    """Return the sums along an axis, in float64. numpy's order of summation is the same on every processor; torch's
    depends on the vector width.
    """
    wide = values.to(torch.float64)
    if values.device.type != "cpu":
        return wide.sum(axis, keepdim=keepdim)
    return torch.from_numpy(np.asarray(wide.numpy().sum(axis, keepdims=keepdim)))


def scale_rows_(values: Tensor, factors: npt.NDArray[Any], offset: int, length: int) -> Tensor:
    """Multiply each row by its factor, in place. `offset` is the flat index of the first entry, which starts a row
    unless all entries are in one.
    """
    if isinstance(values, Lane):
        values.recording.row = length
        return values.become(values.note("BY_ROW", tables=(factors,)))
    if values.numel():
        first, last = offset // length, (offset + values.numel() - 1) // length
        own = torch.from_numpy(factors[first : last + 1, None]).to(values.device)
        values.view(last + 1 - first, -1).mul_(own)
    return values


def gram(vectors: Sequence[Tensor]) -> list[list[float]]:
    """Return ⟨x_i, x_j⟩ for j ≤ i of tensors as vectors; for pieces of vectors, to be summed with `combine`."""
    return [[total(x * y) for y in vectors[: i + 1]] for i, x in enumerate(vectors)]


def combine(parts: Sequence[Sequence[Sequence[float]]]) -> Reals:
    """Return the Gram matrix from those of the pieces, correctly rounded, independent of their order.

    All of it is NaN if a product is not finite: angles to a vector whose norm overflows are unknown.
    """
    matrix = np.full((len(parts[0]), len(parts[0])), math.nan)
    if not all(math.isfinite(value) for part in parts for row in part for value in row):
        return matrix
    for i in range(len(matrix)):
        for j in range(i + 1):
            matrix[i, j] = matrix[j, i] = math.fsum(part[i][j] for part in parts)
    return matrix


def slerp(matrix: Reals, t: float, parallel: float = PARALLEL) -> Reals:
    """Return the coefficients of the point at `t` on the great circle from x_0 to x_1.

    c = (sin((1−t)φ), sin(tφ)) / sin φ with cos φ = ⟨x_0, x_1⟩ / ‖x_0‖‖x_1‖; linear where |cos φ| > `parallel`.
    A zero vector counts as orthogonal to everything.
    """
    norms = math.sqrt(matrix[0, 0] * matrix[1, 1])
    cosine = 0.0 if norms == 0 else matrix[0, 1] / norms
    if abs(cosine) > parallel:
        return np.array([1 - t, t])
    angle = math.acos(cosine)
    return np.array([math.sin((1 - t) * angle), math.sin(t * angle)]) / math.sin(angle)


def barycentre(matrix: Reals, weights: Sequence[float], epsilon: float) -> Reals:
    """Return the coefficients of the weighted mean of directions, at the weighted mean of lengths.

    m = Σ w x/‖x‖, result (Σ w ‖x‖) m/‖m‖; plain Σ w x where the directions cancel (‖m‖ < `epsilon`).
    """
    weight = np.asarray(weights, dtype=np.float64)
    norms = np.sqrt(np.diag(matrix))
    shares = weight / (norms + epsilon)
    length = _root(float(shares @ matrix @ shares))
    if length < epsilon:
        return weight
    return shares * (float(weight @ norms) / length)


def _root(square: float) -> float:
    """Return the square root; 0 of a number that rounding made negative, NaN of NaN."""
    return 0.0 if square < 0 else math.sqrt(square)


def karcher(matrix: Reals, weights: Sequence[float], iterations: int, tolerance: float) -> Reals:
    """Return the coefficients of the Karcher mean of directions, at the weighted mean of lengths.

    On the unit sphere u ← exp_u(Σ w log_u(u_i)), from the normalised mean, until the tangent step is shorter than
    `tolerance`. Vectors shorter than `tolerance` have no direction and count only for the length. Vectors without
    weight do not count. Directions that cancel have no mean on the sphere: the result is then the plain Σ w x.
    """
    weight = np.asarray(weights, dtype=np.float64) / sum(weights)
    norms = np.sqrt(np.diag(matrix))
    valid = ~(norms <= tolerance) & (weight > 0)
    if not valid.any():
        return np.zeros(len(norms))
    inverse = np.where(valid, 1 / np.where(valid, norms, 1), 0)
    share = np.where(valid, weight, 0)
    share = share / share.sum()
    cosines = matrix * np.outer(inverse, inverse)

    def length(c: Reals) -> float:
        return _root(float(c @ cosines @ c))

    point = share
    if length(point) <= tolerance:
        return weight
    point = point / length(point)
    for _ in range(iterations):
        dots = np.clip(cosines @ point, -1, 1)
        angles = np.arccos(dots)
        near = angles < tolerance
        sines = np.where(near, 1, np.sin(angles))
        # An antipode has no logarithm: its direction is arbitrary, so it is ignored.
        pulls = np.where(near | (sines < tolerance), 0, share * angles / np.maximum(sines, tolerance))
        step = pulls - float(pulls @ dots) * point
        size = length(step)
        if size < tolerance:
            break
        point = math.cos(size) * point + (math.sin(size) / size) * step
        point = point / length(point)
    coefficients: Reals = point * inverse * float(weight @ norms)
    return coefficients
