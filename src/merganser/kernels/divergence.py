"""The Kullback-Leibler divergence of softmaxes of rows, with the same bits on every processor.

With p = softmax(a) + ε and q = softmax(b) + ε, ε = 1e-8, it is Σ p log(p/q) = Σ (p log(p/q) − p + q). No term of the
second sum is negative, so that nothing cancels, and a divergence D has an error of at most 2e-15 √D + 1e-14 D. The
divergence of usual fine-tunes is smaller than the rounding of a softmax in float32.

Additions, products and quotients are rounded alike everywhere, exponentials and logarithms are not. They are computed
here from the former, in the order of `divergence.c`, which does the same compiled:

- eˣ = 2ᵏ eʳ with k = ⌊x / log 2⌉, |r| ≤ log(2)/2, and eʳ = 1 + r + r² Q(r), to a relative 2e-17 before rounding;
- log(p/q) = k log 2 + 2 artanh(z) with z = (p − 2ᵏq)/(p + 2ᵏq), |z| ≤ 0.2004, and artanh(z) = z + z³ S(z²). The terms
  are (p + 2ᵏq)(z² + (1 + z) z³ S(z²)) + k log(2) p + q − 2ᵏq, to a relative 4e-16 before rounding. k is zero for near
  vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from merganser.kernels.arrays import AnyArray
from merganser.kernels.recording import Lane
from merganser.kernels.tiles import TILE, Results
from merganser.lazy import np

if TYPE_CHECKING:
    from torch import Tensor


#: Coefficients of Q and S, by falling powers: interpolations at Chebyshev's points.
_EXPONENTIAL = (
    2.510038549551032e-08, 2.7620088445409746e-07, 2.7557268459997064e-06, 2.4801521295954376e-05,
    0.00019841269863053618, 0.0013888888917213717, 0.008333333333330062, 0.04166666666662413,
    0.16666666666666669, 0.5000000000000001,
)  # fmt: skip
_ARTANH = (
    0.07560689717850949, 0.07641692413781613, 0.0909231166129282, 0.11111091266044083,
    0.14285714419043646, 0.1999999999966471, 0.3333333333333347,
)  # fmt: skip
_LOG2 = 0.6931471805599453
#: log 2 in two parts; products of the first with a small integer are exact.
_LOG2_PARTS = 0.6931471803691238, 1.9082149292705877e-10
_LEAST = -708.0
_EPSILON = 1e-8
#: Entries whose divergence numpy computes at a time: they stay in the cache.
_CACHED = 1 << 15


def divergences(model: Tensor, base: Tensor, length: int) -> AnyArray:
    """Return KL(softmax(model) + ε ‖ softmax(base) + ε) of each row of `length` entries, in the dtype of the model."""
    if isinstance(model, Lane):
        recording = model.recording
        recording.row, recording.tile = length, max(1, TILE // length) * length  # whole rows
        found: AnyArray = recording.end("DIVERGENCE", _read_rows, model, base)
        return found
    m, b = (side.reshape(-1, length).cpu().numpy() for side in (model, base))
    step = max(1, _CACHED // length)
    with np.errstate(all="ignore"):  # NaN, where it is allowed
        parts = [_divergences(m[row : row + step], b[row : row + step]) for row in range(0, len(m), step)]
    together: AnyArray = np.concatenate(parts).astype(m.dtype)
    return together


def _read_rows(number: int, results: Results) -> AnyArray:
    rows: AnyArray = results.rows[number].astype(np.float32)
    return rows


def _divergences(model: AnyArray, base: AnyArray) -> AnyArray:
    sums: AnyArray = relative_entropy(_softmax(model), _softmax(base)).sum(axis=-1)
    return sums


def _softmax(rows: AnyArray) -> AnyArray:
    wide = rows.astype(np.float64)
    powers = exponential(wide - wide.max(axis=-1, keepdims=True))
    shares: AnyArray = powers * (1 / powers.sum(axis=-1, keepdims=True))
    return shares + _EPSILON


def exponential(x: AnyArray) -> AnyArray:
    """Return eˣ for x ≤ 0, and e⁻⁷⁰⁸ for smaller ones than that."""
    x = np.maximum(x, _LEAST)
    k = np.rint(x * (1 / _LOG2))
    r = (x - k * _LOG2_PARTS[0]) - k * _LOG2_PARTS[1]
    y = r * r * _polynomial(_EXPONENTIAL, r) + r + 1
    found: AnyArray = (y.view(np.int64) + (k.astype(np.int64) << 52)).view(np.float64)
    return found


def relative_entropy(p: AnyArray, q: AnyArray) -> AnyArray:
    """Return p log(p/q) − p + q of positive numbers whose quotients are between 2⁻¹⁰⁰⁰ and 2¹⁰⁰⁰."""
    k = (p.view(np.int64) - q.view(np.int64) + (1 << 51)) >> 52
    near = q * ((k + 1023) << 52).view(np.float64)
    both = p + near
    z = (p - near) / both
    w = z * z
    terms: AnyArray = (w * z * _polynomial(_ARTANH, w) * (z + 1) + w) * both + (k * _LOG2 * p + (q - near))
    return terms


def _polynomial(coefficients: Sequence[float], x: AnyArray) -> AnyArray:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value *= x
        value += coefficient
    return value
