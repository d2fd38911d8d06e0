"""The canonical form of a network, which orthogonal maps need: one of many with the same function.

A normalisation x ↦ γ ⊙ x/‖x‖ + β commutes with rotations only without its scale and shift, which the linear layers that
read it can absorb. LayerNorm removes the mean of its input, so the layers that write to the stream may be centred.
Queries and keys, and values and outputs, enter a head only as a product LᵀR, which is invariant under any invertible
map: the balanced factors of its singular value decomposition leave only orthogonal maps. Each step preserves the
function and the architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reader:
    """A linear layer: the axis of its weight that counts its inputs, and its bias."""

    weight: str
    axis: int
    bias: str | None


@dataclass(frozen=True)
class Normalisation:
    """The scale and shift of a normalisation, and the layers that read its output."""

    scale: str | None
    shift: str | None
    readers: tuple[Reader, ...]


#: Tensors and, for each, the axis that counts the heads and the units inside them, heads first.
Sides = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class HeadProduct:
    """Two sets of tensors of which only the product over the units of each of `heads` heads matters."""

    heads: int
    left: Sides
    right: Sides


@dataclass(frozen=True)
class CanonicalForm:
    """The steps to a model's canonical form; empty for symmetries of permutations."""

    normalisations: tuple[Normalisation, ...] = ()
    centred: tuple[tuple[str, int], ...] = ()
    products: tuple[HeadProduct, ...] = ()

    def of(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the canonical form of a model's weights, with the same function; unchanged tensors are shared."""
        found = dict(state)
        if not (self.normalisations or self.centred or self.products):
            return found
        names = {name for name, _ in self.places}
        for name in names:
            found[name] = state[name].double()
        for norm in self.normalisations:
            _fold(found, norm)
        for name, axis in self.centred:
            found[name] = found[name] - found[name].mean(axis, keepdim=True)
        for product in self.products:
            _balance(found, product)
        return {name: tensor.to(state[name].dtype) if name in names else tensor for name, tensor in found.items()}

    @property
    def places(self) -> Iterator[tuple[str, int]]:
        """Yield every tensor that changes, with an axis along which it does."""
        yield from self.centred
        for product in self.products:
            yield from (*product.left, *product.right)
        for norm in self.normalisations:
            yield from ((name, 0) for name in (norm.scale, norm.shift) if name is not None)
            for reader in norm.readers:
                yield reader.weight, reader.axis
                if reader.bias is not None:
                    yield reader.bias, 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CanonicalForm:
        """Read the JSON of `dataclasses.asdict`."""

        def sides(value: Sequence[Sequence[Any]]) -> Sides:
            return tuple((str(name), int(axis)) for name, axis in value)

        return cls(
            tuple(
                Normalisation(norm["scale"], norm["shift"], tuple(Reader(**reader) for reader in norm["readers"]))
                for norm in data.get("normalisations", ())
            ),
            sides(data.get("centred", ())),
            tuple(HeadProduct(p["heads"], sides(p["left"]), sides(p["right"])) for p in data.get("products", ())),
        )


def _fold(state: dict[str, Tensor], norm: Normalisation) -> None:
    """Fold W ← W diag(γ) and b ← b + Wβ into every reader, then set γ ← 1 and β ← 0."""
    for reader in norm.readers:
        weight = state[reader.weight].movedim(reader.axis, -1)
        if norm.shift is not None and reader.bias is not None:
            state[reader.bias] = state[reader.bias] + weight @ state[norm.shift]
        if norm.scale is not None:
            state[reader.weight] = (weight * state[norm.scale]).movedim(-1, reader.axis).contiguous()
    if norm.scale is not None:
        state[norm.scale] = torch.ones_like(state[norm.scale])
    if norm.shift is not None:
        state[norm.shift] = torch.zeros_like(state[norm.shift])


def _balance(state: dict[str, Tensor], product: HeadProduct) -> None:
    """Set L, R ← O √S Uᵀ, O √S Vᵀ in every head, for LᵀR = U S Vᵀ and the orthogonal O that changes them least.

    Balanced tensors do not change.
    """

    def read(side: Sides) -> Tensor:
        """(heads, units, everything else)"""
        shape = (product.heads, state[side[0][0]].shape[side[0][1]] // product.heads, -1)
        return torch.cat([state[name].movedim(axis, 0).reshape(shape) for name, axis in side], dim=-1)

    def write(side: Sides, value: Tensor) -> None:
        widths = [state[name].numel() // state[name].shape[axis] for name, axis in side]
        for (name, axis), part in zip(side, torch.split(value, widths, dim=-1), strict=True):
            moved = state[name].movedim(axis, 0)
            state[name] = part.reshape(moved.shape).movedim(0, axis).contiguous()

    old = [read(side) for side in (product.left, product.right)]
    (basis_l, left), (basis_r, right) = (torch.linalg.qr(one.mT) for one in old)
    u, s, vh = torch.linalg.svd(left @ right.mT)
    root = s.sqrt().unsqueeze(-2)
    new = [(basis_l @ (u * root)).mT, (basis_r @ (vh.mT * root)).mT]
    u, _, vh = torch.linalg.svd(old[0] @ new[0].mT + old[1] @ new[1].mT)
    for side, one in zip((product.left, product.right), new, strict=True):
        write(side, u @ vh @ one)
