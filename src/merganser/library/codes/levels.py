"""Quantise to few levels and prune small entries: at most four bits, or eight for vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from merganser.lazy import np, torch
from merganser.library.codes.blobs import BlobReader, BlobWriter
from merganser.library.codes.coding import Code, Delta
from merganser.library.codes.signs import read_scales, write_scales

if TYPE_CHECKING:
    from torch import Tensor

Groups = Literal["tensor", "rows"]
_GROUPS: tuple[str, ...] = get_args(Groups)
#: Largest symbols with 2, 3, 4 and 8 bits.
SYMBOLS = (1, 3, 7, 127)
#: The dead zone extends this share of a step on either side of zero; half a step would be plain rounding.
_PRUNED = 0.6


@dataclass(frozen=True)
class Levels(Code):
    """Δ ≈ ρ_g · c_|q| · sign(q), q = sign(Δ) ⌊|Δ| / (ρ_g · step) + 0.4⌋, at most 1, 3, 7 or 127 by the step.

    ρ_g is the root mean square of a group (the tensor, or each row), c_j the mean of |Δ|/ρ_g over the entries of level
    j (up to four bits), and entries below 0.6 steps are pruned. The symbols are Huffman-coded, so that a longer step
    takes fewer bytes: it prunes more and needs fewer levels. After UltraDelta (Wang et al. 2025, arXiv:2505.13563),
    which quantises uniformly and prunes within groups. There pruning is random and rescaled; here it removes the
    smallest entries, which gives a smaller error for the same bytes.
    """

    name: ClassVar[str] = "levels"
    number: ClassVar[int] = 2
    step: float = 1.0
    groups: Groups = "tensor"

    def write(self, change: Delta, out: BlobWriter) -> None:
        delta = change.matrix
        norms = torch.linalg.vector_norm(delta, dim=1, dtype=torch.float64)
        scales = (
            norms / delta.shape[1] ** 0.5 if self.groups == "rows" else norms.norm().reshape(1) / delta.numel() ** 0.5
        )
        kind = 0 if self.step >= 2.4 else 1 if self.step >= 1.2 else 2 if self.step >= 0.5 else 3
        out.numbers("BBf", _GROUPS.index(self.groups), kind, self.step)
        write_scales(out, scales)
        most = SYMBOLS[kind]
        size = delta.abs() / (scales.float()[:, None].clamp(min=1e-38) * self.step)
        symbols = (size + (1 - _PRUNED)).floor_().clamp_(max=most)
        if kind < 3:
            codes = symbols.long().reshape(-1)
            sums = torch.bincount(codes, size.double().reshape(-1), minlength=most + 1)[1:]
            counts = torch.bincount(codes, minlength=most + 1)[1:]
            means = torch.where(counts > 0, sums / counts.clamp(min=1), 0.0)
            out.array(means.to(torch.float16).numpy())
        out.symbols((symbols * delta.sign()).to(torch.int8).numpy(), most)

    @staticmethod
    def read(source: BlobReader, height: int, width: int) -> Tensor:
        groups, kind, step = source.numbers("BBf")
        if groups >= len(_GROUPS) or kind >= len(SYMBOLS) or not 0 < step < 1e9:
            raise source.damaged("its levels are invalid")
        scales = read_scales(source, (1, height)[groups])[:, None] * step
        most = SYMBOLS[kind]
        values = np.arange(most + 1, dtype=np.float32)
        if kind < 3:
            values[1:] = source.array("f2", most)
        table = torch.from_numpy(np.concatenate([-values[:0:-1], values]))
        symbols = torch.from_numpy(source.symbols(most, height * width)).view(height, width)
        decoded: Tensor = table[symbols.int() + most] * scales
        return decoded
