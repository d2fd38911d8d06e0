"""Updates of one weight by an adapter, in float32 and by rows: LoRA, DoRA, LoHa, LoKr, (IA)³, trained tokens.

An update is `turned` if the layer stores its weight input × output, as GPT-2's Conv1D does.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, Rows, select_rows
from merganser.checkpoints.lazy_tensors import DerivedTensor, LazyTensor
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AdapterUpdate:
    """A change of one weight, with the tensors of the adapter's file by their names there."""

    weights: Checkpoint
    parts: Mapping[str, str]

    @abstractmethod
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Return the weight shapes that this fits: as a Linear layer stores them, then turned; -1 means any size.

        Axes after the first may be grouped differently, as in convolutions.
        """

    def fits(self, shape: tuple[int, ...]) -> tuple[bool, bool]:
        """Return whether this fits a weight of that shape as a Linear layer stores it, and whether it fits turned."""
        plain, *turned = [_agree(each, shape) for each in self.shapes()]
        return plain, any(turned)

    @abstractmethod
    def apply(self, weight: LazyTensor, rows: Rows | None, turned: bool) -> Tensor:
        """Return the rows of the weight with the change, in float32."""

    def read(self, part: str) -> Tensor:
        """Return a tensor of the adapter's file in float32."""
        return self.weights.read(self.parts[part]).float()

    def shape_of(self, part: str) -> tuple[int, ...]:
        return self.weights.spec(self.parts[part]).shape


@dataclass(frozen=True)
class LoraUpdate(AdapterUpdate):
    """W + s·B·A; with magnitudes m (DoRA), m · (W + s·B·A) / ‖W + s·B·A‖ for each output.

    The factors of an embedding are transposed: its update is s·(B·A)ᵀ.
    """

    scale: float
    embedding: bool = False

    @property
    def a(self) -> str:
        return self.parts["lora_embedding_A" if self.embedding else "lora_A"]

    @property
    def b(self) -> str:
        return self.parts["lora_embedding_B" if self.embedding else "lora_B"]

    def shapes(self) -> Sequence[tuple[int, ...]]:
        a, b = self.weights.spec(self.a).shape, self.weights.spec(self.b).shape
        if self.embedding:
            return [(a[1], b[0])]
        return [(b[0], *a[1:]), (a[1], b[0])] if len(a) == 2 else [(b[0], *a[1:])]

    def factors(self, turned: bool) -> tuple[Tensor, Tensor]:
        """Return (B, A) so that the update of the stored weight is s·B·A."""
        a, b = self.weights.read(self.a).float(), self.weights.read(self.b).float()
        return (a.T, b.T) if turned or self.embedding else (b, a)

    def delta(self, rows: Rows | None, turned: bool) -> Tensor:
        b, a = self.factors(turned)
        b = select_rows(b, rows)
        product = b @ a if a.dim() == 2 else torch.einsum("or,r...->o...", b.flatten(1), a)
        return product * self.scale

    def apply(self, weight: LazyTensor, rows: Rows | None, turned: bool) -> Tensor:
        if "lora_magnitude_vector" not in self.parts:
            base = weight.read(rows).float()
            return base + self.delta(rows, turned).reshape(base.shape)
        magnitude = self.read("lora_magnitude_vector").flatten()
        if turned or self.embedding:  # outputs are columns, whose norms need every row
            whole = weight.read().float() + self.delta(None, turned)
            norms: Tensor = torch.linalg.vector_norm(whole, dim=0)
            return select_rows(whole, rows) * (magnitude / norms)
        changed = weight.read(rows).float() + self.delta(rows, turned)
        factor: Tensor = select_rows(magnitude, rows) / torch.linalg.vector_norm(changed.flatten(1), dim=1)
        return changed * factor.view(-1, *[1] * (changed.dim() - 1))


@dataclass(frozen=True)
class LoconUpdate(LoraUpdate):
    """W + s·B·A of a convolution, or s·Σ B·T·A with a core T in the middle."""

    def shapes(self) -> Sequence[tuple[int, ...]]:
        window = self.shape_of("lora_mid")[2:] if "lora_mid" in self.parts else self.shape_of("lora_A")[2:]
        return [(self.shape_of("lora_B")[0], self.shape_of("lora_A")[1], *window)]

    def delta(self, rows: Rows | None, turned: bool) -> Tensor:
        if "lora_mid" not in self.parts:
            return super().delta(rows, turned)
        up, down = self.read("lora_B").flatten(1), self.read("lora_A").flatten(1)
        return _core(self.read("lora_mid"), select_rows(up, rows), down) * self.scale


@dataclass(frozen=True)
class LohaUpdate(AdapterUpdate):
    """W + s·(A₁B₁) ∘ (A₂B₂); in convolutions each product may have a core T."""

    scale: float

    def shapes(self) -> Sequence[tuple[int, ...]]:
        first, second = self.shape_of("hada_w1_a"), self.shape_of("hada_w1_b")
        if "hada_t1" in self.parts:
            return [(first[1], second[1], *self.shape_of("hada_t1")[2:])]
        return [(first[0], second[1])]

    def apply(self, weight: LazyTensor, rows: Rows | None, turned: bool) -> Tensor:
        base = weight.read(rows).float()
        first, second = (self._product(place, rows) for place in "12")
        return base + (first * second).reshape(base.shape) * self.scale

    def _product(self, place: str, rows: Rows | None) -> Tensor:
        a, b = self.read(f"hada_w{place}_a"), self.read(f"hada_w{place}_b")
        if f"hada_t{place}" in self.parts:
            return _core(self.read(f"hada_t{place}"), select_rows(a.T, rows), b)
        return select_rows(a, rows) @ b


@dataclass(frozen=True)
class LokrUpdate(AdapterUpdate):
    """W + s·C ⊗ D, a Kronecker product; each factor may be a product itself."""

    scale: float

    def shapes(self) -> Sequence[tuple[int, ...]]:
        (rows, columns), (height, width, *rest) = self._shape("1"), self._shape("2")
        return [(rows * height, columns * width, *rest)]

    def apply(self, weight: LazyTensor, rows: Rows | None, turned: bool) -> Tensor:
        base = weight.read(rows).float()
        c, d = self._factor("1"), self._factor("2")
        start, stop = rows if rows is not None else (0, len(c) * len(d))
        first, last = start // len(d), -(-stop // len(d))
        c = c[first:last].reshape(*c[first:last].shape, *[1] * (d.dim() - 2))
        product = torch.kron(c, d)[start - first * len(d) : stop - first * len(d)]
        return base + product.reshape(base.shape) * self.scale

    def _factor(self, place: str) -> Tensor:
        if f"lokr_w{place}" in self.parts:
            return self.read(f"lokr_w{place}")
        a, b = self.read(f"lokr_w{place}_a"), self.read(f"lokr_w{place}_b")
        return _core(self.read("lokr_t2"), a.T, b) if place == "2" and "lokr_t2" in self.parts else a @ b

    def _shape(self, place: str) -> tuple[int, ...]:
        if f"lokr_w{place}" in self.parts:
            return self.shape_of(f"lokr_w{place}")
        a, b = self.shape_of(f"lokr_w{place}_a"), self.shape_of(f"lokr_w{place}_b")
        if place == "2" and "lokr_t2" in self.parts:
            return (a[1], b[1], *self.shape_of("lokr_t2")[2:])
        return (a[0], b[1])


@dataclass(frozen=True)
class Ia3Update(AdapterUpdate):
    """l ∘ W, and l ∘ b for the bias: scales the outputs, or the inputs of a feed-forward layer."""

    bias: bool = False

    @property
    def scales_inputs(self) -> bool:
        return self.shape_of("ia3_l")[0] == 1 and self.shape_of("ia3_l") != (1, 1)

    def shapes(self) -> Sequence[tuple[int, ...]]:
        size = max(self.shape_of("ia3_l"))
        if self.bias:
            return [(size,)]
        return [(-1, size), (size, -1)] if self.scales_inputs else [(size, -1), (-1, size)]

    def apply(self, weight: LazyTensor, rows: Rows | None, turned: bool) -> Tensor:
        base, scale = weight.read(rows).float(), self.read("ia3_l")
        if self.bias:
            return base * select_rows(scale.flatten(), rows)
        scale = scale.T if turned else scale
        return base * (scale if scale.shape[0] == 1 else select_rows(scale, rows))


@dataclass(frozen=True)
class TokenUpdate(AdapterUpdate):
    """An embedding with some trained rows, which replace the base's."""

    tokens: tuple[int, ...]

    def shapes(self) -> Sequence[tuple[int, ...]]:
        return [(-1, self.shape_of("trainable_tokens_delta")[1])]

    def fits(self, shape: tuple[int, ...]) -> tuple[bool, bool]:
        return super().fits(shape)[0] and max(self.tokens, default=0) < shape[0], False

    def apply(self, weight: LazyTensor, rows: Rows | None, turned: bool) -> Tensor:
        first = rows[0] if rows is not None else 0
        changed = weight.read(rows).float().clone()
        places = torch.tensor(self.tokens) - first
        inside = (places >= 0) & (places < len(changed))
        changed[places[inside]] = self.read("trainable_tokens_delta")[inside]
        return changed


@dataclass(frozen=True)
class RowBlock:
    """Rows of a weight that change as rows of another weight do.

    Attributes:
        start: The first row of the weight.
        stop: The last row, exclusive.
        offset: The row of the other weight that corresponds to `start`.
        total: The number of rows of the other weight.
        update: The change of the other weight.
    """

    start: int
    stop: int
    offset: int
    total: int
    update: AdapterUpdate


@dataclass(frozen=True)
class BlocksUpdate(AdapterUpdate):
    """Changes of blocks of rows, where the base fuses layers that the adapter splits, or splits what it fuses."""

    blocks: tuple[RowBlock, ...]
    height: int

    def shapes(self) -> Sequence[tuple[int, ...]]:
        for block in self.blocks:
            (rows, *columns), *_ = block.update.shapes()
            if rows != block.total:
                return [(rows, *columns)]
        return [(self.height, *columns)]

    def apply(self, weight: LazyTensor, rows: Rows | None, turned: bool) -> Tensor:
        first, last = rows or (0, self.height)
        found = weight.read((first, last)).float().clone()
        for block in self.blocks:
            start, stop = max(first, block.start), min(last, block.stop)
            if start < stop:
                shift = block.offset - block.start
                moved = _MovedRows(weight, shift, (block.total, *weight.shape[1:]))
                found[start - first : stop - first] = block.update.apply(moved, (start + shift, stop + shift), turned)
        return found


@dataclass(frozen=True, eq=False)
class _MovedRows(DerivedTensor):
    """A weight whose rows have other numbers."""

    shift: int
    shape: tuple[int, ...]

    def read(self, rows: Rows | None = None) -> Tensor:
        first, last = rows or (0, self.shape[0])
        return self.source.read((first - self.shift, last - self.shift))


def _agree(wanted: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if -1 in wanted:
        return len(wanted) == len(shape) and all(a in (-1, b) for a, b in zip(wanted, shape, strict=True))
    return wanted[0] == shape[0] and math.prod(wanted) == math.prod(shape)


def _core(core: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return Σ T[i, j, …] · a[·, i] · b[j, ·], the CP form of a convolution."""
    return torch.einsum("ij...,pi,jr->pr...", core, a, b)


@dataclass(frozen=True, eq=False)
class UpdatedTensor(DerivedTensor):
    """A weight with an adapter's update."""

    update: AdapterUpdate
    turned: bool

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.source.shape

    def read(self, rows: Rows | None = None) -> Tensor:
        return self.update.apply(self.source, rows, self.turned)
