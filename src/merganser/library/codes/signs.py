"""Sign and scale: one bit per entry (BitDelta, Liu et al. 2024, arXiv:2402.10193)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from merganser.lazy import np, torch
from merganser.library.codes.blobs import BlobReader, BlobWriter
from merganser.library.codes.coding import Code, Delta

if TYPE_CHECKING:
    from torch import Tensor

Grouping = Literal["tensor", "rows", "columns"]
_AXES: tuple[str, ...] = get_args(Grouping)


@dataclass(frozen=True)
class Signs(Code):
    """α · sign(Δ) with one α per tensor, row or column.

    α = mean |Δ| minimises ‖Δ − α sign(Δ)‖. If the Gram matrix G of the inputs is given, scales of the tensor and of
    rows are calibrated to it: α = ⟨Δ, S⟩_G / ⟨S, S⟩_G with S = sign(Δ).
    """

    name: ClassVar[str] = "signs"
    number: ClassVar[int] = 1
    axis: Grouping = "tensor"

    def write(self, change: Delta, out: BlobWriter) -> None:
        delta = change.matrix
        positive = delta >= 0
        signs = positive.float() * 2 - 1
        along = {"tensor": (0, 1), "rows": (1,), "columns": (0,)}[self.axis]
        weighed = signs if self.axis == "columns" else change.weigh(signs)
        wide = torch.float64
        scales = (weighed * delta).sum(along, dtype=wide) / (weighed * signs).sum(along, dtype=wide)
        out.numbers("B", _AXES.index(self.axis))
        write_scales(out, scales.reshape(-1))
        out.array(np.packbits(positive.numpy()))

    @staticmethod
    def read(source: BlobReader, height: int, width: int) -> Tensor:
        (axis,) = source.numbers("B")
        if axis >= len(_AXES):
            raise source.damaged("its scales have no valid axis")
        scales = read_scales(source, (1, height, width)[axis])
        bits = np.unpackbits(source.array("u1", -(-height * width // 8)), count=height * width)
        signs = torch.from_numpy(bits.reshape(height, width).astype(np.float32)) * 2 - 1
        return signs * (scales[:, None] if _AXES[axis] == "rows" else scales)


def write_scales(out: BlobWriter, scales: Tensor) -> None:
    """Write scales in half precision relative to the largest of them."""
    largest = float(scales.abs().max())
    out.numbers("f", largest)
    if scales.numel() > 1:
        out.array((scales.double() / (largest or 1.0)).to(torch.float16).numpy())


def read_scales(source: BlobReader, count: int) -> Tensor:
    """Read `count` scales as `write_scales` wrote them."""
    (largest,) = source.numbers("f")
    if not np.isfinite(largest):
        raise source.damaged("a scale is not a finite number")
    if count == 1:
        return torch.tensor([largest])
    scales: Tensor = torch.from_numpy(source.array("f2", count).astype(np.float32)) * largest
    return scales
