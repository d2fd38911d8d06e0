"""Low-rank factors with fewer bits for smaller singular values (Delta-CoMe, Ping et al. 2024, arXiv:2406.08903)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from merganser.lazy import np, torch
from merganser.library.codes.blobs import BlobReader, BlobWriter
from merganser.library.codes.coding import Code, Delta, Triple
from merganser.library.codes.levels import SYMBOLS

if TYPE_CHECKING:
    from torch import Tensor

#: Step of the last component, in root mean squares of its entries. With longer steps it costs more than it is worth:
#: error plus λ · bytes of a Gaussian component of d + d entries exceed its energy.
LAST = 1.35


@dataclass(frozen=True)
class MixedFactors(Code):
    """Δ ≈ Σ_{r ≤ rank} u_r s_r v_rᵀ with u_r and v_r in 8, 4, 3 and 2 bits, by rank.

    The cost of rounding u_r and v_r grows with σ_r², so the steps of σ_r u_r and σ_r v_r are the same for every r,
    which allocates bits optimally: large components have many levels, small ones few. `step` is that of the last
    component in root mean squares of its entries; a shorter one pays only if the spectrum ends there. The left factor
    is fitted to the rounded right one by least squares, A = Δ G V (Vᵀ G V)⁻¹, before it is rounded itself. Symbols of
    components with the same bits are Huffman-coded together.
    """

    name: ClassVar[str] = "factors"
    number: ClassVar[int] = 3
    rank: int = 1
    step: float = LAST

    def write(self, change: Delta, out: BlobWriter) -> None:
        found = change.factors.truncate(self.rank)
        d, m = change.matrix.shape
        if not found.rank:
            out.numbers("I", 0)
            return
        step = self.step * float(found.s[-1]) / math.sqrt((d + m) / 2)
        right, right_steps = _round_columns(found.v, step / found.s)
        v = right * right_steps
        weighed = change.weigh(v.T)
        inner = weighed @ v
        inner.diagonal().add_(1e-9 * inner.diagonal().mean())
        a = torch.linalg.solve(inner, (weighed.float() @ change.matrix.T).double()).T
        left, left_steps = _round_columns(a, torch.full_like(right_steps, step))
        out.numbers("I", found.rank)
        out.array((left_steps * right_steps).float().numpy())
        for side in (left, right):
            _write_columns(out, side.to(torch.int8).numpy())

    @staticmethod
    def read(source: BlobReader, height: int, width: int) -> Triple:
        (rank,) = source.numbers("I")
        if rank > min(height, width):
            raise source.damaged(f"it has rank {rank} for a matrix of {height} × {width}")
        s = torch.from_numpy(source.array("f4", rank).copy()) if rank else torch.zeros(0)
        u, v = (_read_columns(source, side, rank) for side in (height, width))
        return Triple(u, s, v)


def _round_columns(columns: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Round columns to whole steps, with longer steps where 127 of them would not suffice."""
    steps = torch.maximum(steps, columns.abs().amax(0) / SYMBOLS[-1])
    return (columns / steps).round(), steps


def _write_columns(out: BlobWriter, columns: np.ndarray[Any, Any]) -> None:
    """Write columns in sections of 8, 4, 3 and 2 bits; the number of bits never increases."""
    largest = np.maximum.accumulate(np.abs(columns).max(0, initial=0)[::-1])[::-1]
    ends = [int((largest > most).sum()) for most in reversed(SYMBOLS[:-1])] + [columns.shape[1]]
    out.numbers("4I", *ends)
    for start, end, most in zip([0, *ends], ends, reversed(SYMBOLS), strict=False):
        if end > start:
            out.symbols(columns[:, start:end].T, most)


def _read_columns(source: BlobReader, height: int, rank: int) -> Tensor:
    if not rank:
        return torch.zeros(height, 0, dtype=torch.int8)
    ends = source.numbers("4I")
    if list(ends) != sorted(ends) or ends[-1] != rank:
        raise source.damaged("its components do not add up")
    parts = [
        source.symbols(most, (end - start) * height).reshape(end - start, height)
        for start, end, most in zip([0, *ends], ends, reversed(SYMBOLS), strict=False)
        if end > start
    ]
    return torch.from_numpy(np.concatenate(parts)).T
