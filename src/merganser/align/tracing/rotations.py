"""Find units that may be rotated, not only permuted: those that every operation reads and writes linearly.

A bare dim may be turned by any orthogonal map if each operation that sees it is linear in it (layers, sums, products
with numbers), contracts it with itself (scores of attention), moves it as a whole, or normalises it alone. The scale
and shift of a normalisation are in the way unless linear layers alone read it, which then take them over. The rules are
conservative: an operation that is not listed here leaves permutations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from merganser.align.canonical_form import CanonicalForm, HeadProduct, Normalisation, Reader
from merganser.align.tracing.dims import Axes, Dim, factors, find, leaves
from merganser.kernels.assignment import SymmetryGroup

_SHAPE = {"_reshape_alias", "_to_copy", "_unsafe_view", "alias", "cat", "chunk", "clone", "contiguous", "detach",
          "dropout", "expand", "flatten", "neg", "permute", "reshape", "select", "slice", "split", "squeeze", "stack",
          "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view"}  # fmt: skip
_BILINEAR = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"}
_NORMS = {"layer_norm": "centred", "rms_norm": "orthogonal", "_fused_rms_norm": "orthogonal"}


@dataclass(frozen=True, slots=True)
class Use:
    """One operation of a program with the axes of its operands and results."""

    node: Node
    op: str
    arguments: dict[str, Any]
    operands: list[Axes]
    results: list[Axes]


@dataclass(frozen=True, slots=True)
class Rotation:
    """The group of maps of some units, and the preparation of weights that it needs."""

    group: SymmetryGroup
    form: CanonicalForm


class _Fixed(Exception):
    """These units can only be permuted."""


def rotations(
    uses: Sequence[Use], weights: Mapping[str, Axes], tied: set[str], parents: Mapping[Dim, Dim], dims: Sequence[Dim]
) -> dict[Dim, Rotation]:
    """Return the dims that may be rotated. `weights` are the axes of every tensor, `tied` those with several names."""
    found = {}
    for dim in dims:
        if dim not in parents.values():
            with suppress(_Fixed):
                found[dim] = _Units(dim, uses, weights, tied, parents.get(dim)).rotation()
    return found


class _Units:
    """One dim with the operations that use it."""

    def __init__(
        self, dim: Dim, uses: Sequence[Use], weights: Mapping[str, Axes], tied: set[str], parent: Dim | None
    ) -> None:
        self.dim, self.tied, self.parent = dim, tied, parent
        self.names: dict[int, str] = {id(axes): name for name, axes in reversed(list(weights.items()))}
        self.weights = {name: axes for name, axes in weights.items() if self._has(axes)}
        self.uses = [use for use in uses if any(map(self._has, [*use.operands, *use.results]))]
        self.by_node = {use.node: use for use in uses}

    def _has(self, axes: Axes) -> bool:
        return any(leaf is self.dim for axis in axes for leaf in leaves(axis))

    def _place(self, axes: Axes) -> int:
        """Return the only axis that has the units."""
        places = [place for place, axis in enumerate(axes) if any(leaf is self.dim for leaf in leaves(axis))]
        if len(places) != 1:
            raise _Fixed
        return places[0]

    def rotation(self) -> Rotation:
        kinds = {kind for use in self.uses if (kind := self._check(use)) is not None}
        norms = tuple(self._normalisation(use) for use in self.uses if use.op in _NORMS or self._scales(use))
        if kinds and not norms:
            raise _Fixed
        read = {reader.weight for norm in norms for reader in norm.readers}
        own = {name for norm in norms for name in (norm.scale, norm.shift) if name is not None}
        if "centred" in kinds:
            if not self._find_contracted() <= read:
                raise _Fixed
            written = [(name, self._place(axes)) for name, axes in self.weights.items() if name not in read | own]
            return Rotation("centred", CanonicalForm(norms, tuple(written)))
        product = self._find_product() if not norms else None
        return Rotation("orthogonal", CanonicalForm(norms, (), (product,) if product else ()))

    def _check(self, use: Use) -> str | None:
        """Refuse an operation that is not linear in the units; return the group of a normalisation."""
        reads, writes = [axes for axes in use.operands if self._has(axes)], all(map(self._has, use.results))
        # A result without the units is another part of what was cut: the values beside queries and keys.
        if use.op in _SHAPE and len(reads) == len([a for a in use.operands if a]):
            return None
        if use.op in ("embedding", "expand", "expand_as", "index_select") and writes:
            return None
        if use.op in ("add", "sub") and writes and len(reads) == len(use.operands) == 2:
            return None
        if use.op in ("mul", "div") and writes and (len(reads) == 1 or self._scales(use)):
            if use.op == "div" and not self._has(use.operands[0]):
                raise _Fixed
            return None
        if use.op in ("mean", "sum") and (writes or self._square(use.node.args[0])):
            return None
        if use.op == "pow" and self._square(use.node):
            return "orthogonal"
        if use.op in _BILINEAR:
            self._check_bilinear(use)
            return None
        if use.op == "scaled_dot_product_attention":
            self._check_attention(use)
            return None
        if use.op in ("conv1d", "conv2d", "conv3d", "convolution") and use.arguments.get("groups") == 1:
            return None
        if use.op in _NORMS and len(use.arguments["normalized_shape"]) == 1 and find(use.results[0][-1]) is self.dim:
            return _NORMS[use.op]
        raise _Fixed

    def _check_bilinear(self, use: Use) -> None:
        added = [use.arguments.get("bias"), use.arguments.get("self") if use.op in ("addmm", "baddbmm") else None]
        factors_ = [axes for axes in use.operands if not any(axes is other for other in added)]
        times = sum(map(self._has, factors_))
        written = self._has(use.results[0])
        if not ((times == 1 and written) or (times == 2 and not written)) or len(factors_) != 2:
            raise _Fixed
        if any(isinstance(other, Axes) and self._has(other) != written for other in added):
            raise _Fixed

    def _check_attention(self, use: Use) -> None:
        query, key, value = (use.arguments[name] for name in ("query", "key", "value"))
        scores = find(query[-1]) is self.dim and find(key[-1]) is self.dim and not self._has(value)
        mixed = find(value[-1]) is self.dim and not self._has(query) and not self._has(key)
        if not (scores or mixed):
            raise _Fixed

    def _scales(self, use: Use) -> bool:
        """Return whether an operation multiplies the units by their own weight: the scale of a normalisation."""
        owned = [axes for axes in use.operands if id(axes) in self.names and len(axes) == 1 and self._has(axes)]
        return use.op == "mul" and len(owned) == 1 and len(use.operands) == 2 and all(map(self._has, use.operands))

    def _square(self, node: Any) -> bool:
        """Return whether a node is x², used only for its mean over the units: ‖x‖² is invariant."""
        use = self.by_node.get(node) if isinstance(node, Node) else None
        if use is None or use.op != "pow" or use.arguments.get("exponent") != 2:
            return False
        means = [self.by_node.get(user) for user in use.node.users]
        return all(
            mean is not None and mean.op in ("mean", "sum") and not any(map(self._has, mean.results)) for mean in means
        )

    def _normalisation(self, use: Use) -> Normalisation:
        if use.op == "mul":
            owned = [axes for axes in use.operands if id(axes) in self.names]
            scale, shift = self._name(owned[0]), None
        else:
            scale, shift = (self._name(use.arguments.get(name)) for name in ("weight", "bias"))
        readers = tuple(dict.fromkeys(self._find_readers(use.node)))
        named = {name for r in readers for name in (r.weight, r.bias) if name is not None} | {scale, shift}
        if named & self.tied or (shift is not None and any(reader.bias is None for reader in readers)):
            raise _Fixed
        if (scale is not None or shift is not None) and not all(self._read_once(reader) for reader in readers):
            raise _Fixed
        return Normalisation(scale, shift, readers)

    def _name(self, axes: Any) -> str | None:
        if axes is None:
            return None
        if id(axes) not in self.names:
            raise _Fixed
        return self.names[id(axes)]

    def _find_readers(self, node: Node) -> Iterator[Reader]:
        """Yield the linear layers that read a node's result, unchanged except for its shape or a mean over other
        axes.
        """
        for user in node.users:
            use = self.by_node.get(user)
            if use is None:
                raise _Fixed
            if use.op in _SHAPE | {"mean"} and len([a for a in use.operands if a]) == 1:
                yield from self._find_readers(user)
            elif use.op == "linear" and user.args[0] is node:
                weight = self._name(use.arguments["weight"])
                yield Reader(str(weight), 1, self._name(use.arguments["bias"]))
            elif use.op == "addmm" and user.args[1] is node:
                yield Reader(str(self._name(use.arguments["mat2"])), 0, self._name(use.arguments["self"]))
            else:
                raise _Fixed

    def _read_once(self, reader: Reader) -> bool:
        return [self.names.get(id(axes)) for axes in self._operands()].count(reader.weight) == 1

    def _operands(self) -> Iterator[Axes]:
        for use in self.by_node.values():
            yield from use.operands

    def _find_contracted(self) -> set[str]:
        """Return the weights that some operation sums over the units of."""
        found = set()
        for use in self.uses:
            if use.op in _BILINEAR | {"convolution", "conv1d", "conv2d", "conv3d"}:
                contracted = [axes for axes in use.operands if self._has(axes)] if not self._has(use.results[0]) else []
                found |= {self.names.get(id(axes), "") for axes in contracted if len(contracted) == 2}
        return found - {""}

    def _find_product(self) -> HeadProduct | None:
        """Return the two sets of weights that the units connect, if there are no others and nothing is added there."""
        sides: list[list[str]] = []
        for use in self.uses:
            if use.op in ("add", "sub"):
                return None
            if use.op in _BILINEAR:
                own = [self.names[id(a)] for a in use.operands if id(a) in self.names and self._has(a)]
                if own:
                    sides.append(own)
        every = [name for side in sides for name in side]
        if len(sides) != 2 or sorted(every) != sorted(self.weights) or self.tied.intersection(every):
            return None
        wanted = [self.parent, self.dim] if self.parent is not None else [self.dim]
        placed = [tuple((name, self._place(self.weights[name])) for name in side) for side in sides]
        if any(factors(self.weights[name][axis]) != wanted for side in placed for name, axis in side):
            return None
        return HeadProduct(self.parent.size if self.parent is not None else 1, placed[0], placed[1])
