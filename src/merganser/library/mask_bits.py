"""Masks as bits: pack them into a checkpoint of bytes, and unpack them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, hash_text
from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.vectors import Vector, compute_in_blocks
from merganser.methods.matrices import matrix_shape

MaskKind = Literal["tall", "emr"]
#: Suffix of the name of a tensor that is kept whole.
FULL = "::full"


class Packed(Checkpoint):
    """The masks of an expert, eight entries per byte. Each row of the first axis is packed separately, so that rows
    can be read alone; a vector or a number is one row.
    """

    def __init__(
        self, delta: Vector, shared: Vector, kind: MaskKind, threshold: float, expert: Checkpoint, own: Sequence[str]
    ) -> None:
        self.label = f"{kind} masks of {expert.label}"
        self._delta, self._shared, self._kind, self._threshold = delta, shared, kind, threshold
        self._expert, self._own = expert, own

    def names(self) -> Sequence[str]:
        return [*self._delta.names(), *(name + FULL for name in self._own)]

    def spec(self, name: str) -> TensorSpec:
        if name.endswith(FULL):
            return self._expert.spec(name.removesuffix(FULL))
        height, width = matrix_shape(self._delta.spec(name).shape)
        return TensorSpec((height, -(-width // 8)), torch.uint8)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        if name.endswith(FULL):
            return self._expert.read(name.removesuffix(FULL), rows)
        shape = self._delta.spec(name).shape
        if len(shape) < 2:
            return self._pack(name, None)
        return compute_in_blocks(self.spec(name), rows, lambda part: self._pack(name, part))

    def _pack(self, name: str, rows: Rows | None) -> Tensor:
        delta, shared = self._delta.compute(name, rows), self._shared.compute(name, rows)
        stands_out = delta.abs() > self._threshold * (shared - delta).abs()
        kept = stands_out if self._kind == "tall" else delta * shared > 0
        height = kept.shape[0] if kept.dim() > 1 else 1
        return torch.from_numpy(np.packbits(kept.reshape(height, -1).numpy(), axis=1, bitorder="little"))

    def fingerprint(self) -> str:
        parts = f"{self._kind} {self._threshold} {self._delta.fingerprint()} {self._shared.fingerprint()}"
        return hash_text(parts)

    def files(self) -> Sequence[Path]:
        return [*self._delta.files(), *self._shared.files(), *self._expert.files()]

    def lineage(self) -> Lineage:
        return Lineage(models=(self._expert.label,), methods=(f"{self._kind} masks",))


def unpack(bits: Checkpoint, name: str, shape: tuple[int, ...], rows: Rows | None) -> Tensor:
    """Return the mask of a tensor of this shape, or some of its rows."""
    _, width = matrix_shape(shape)
    packed = bits.read(name, rows if len(shape) > 1 else None)
    plain = np.unpackbits(packed.numpy(), axis=1, count=width, bitorder="little").astype(bool)
    mask = torch.from_numpy(plain)
    if len(shape) < 2:
        mask = mask.view(shape)
        return mask if rows is None or not shape else mask[rows[0] : rows[1]]
    return mask.view(mask.shape[0], *shape[1:])
