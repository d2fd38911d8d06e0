"""The experts of a mixture in the order of another mixture's: the same function, ready to be merged."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, Rows, View
from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.json_file import read_config
from merganser.checkpoints.layouts import in_layout_of
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.checkpoints.quantised import refuse_quantised
from merganser.checkpoints.row_runs import gather
from merganser.errors import InputError
from merganser.kernels.assignment import Index, assign

_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_FUSED = re.compile(r"(.+\.experts)\.([^.]*[A-Za-z][^.]*(?:\.weight|\.bias)?)")
_ROUTER = re.compile(r"(gate|router)(\..+)?")
_CHUNK = 1 << 22


@dataclass
class ExpertLayer:
    """The tensors of one layer of experts.

    Attributes:
        name: What its tensors' names begin with, e.g. "model.layers.0.mlp.experts".
        single: Part -> the names of that part in every expert, where experts are stored one by one.
        fused: Names of tensors with the experts along their first axis: experts stored together, and the router.
        router: Those of the fused names that belong to the router.
    """

    name: str
    single: dict[str, dict[int, str]] = field(default_factory=dict)
    fused: list[str] = field(default_factory=list)
    router: list[str] = field(default_factory=list)
    count: int = 0


def match_experts(model: Reference, reference: Reference) -> MatchedExperts:
    """Put the experts of a mixture in the order of another's, layer by layer; the model computes what it did.

    The order of a layer maximises Σ_e ⟨W_ref[e], W_model[π(e)]⟩ over the weights of the experts and their rows of the
    router (one linear assignment a layer). Experts stored one by one or fused, and any router with a row for each
    expert. Units inside an expert keep their order: mixtures that were trained apart need `mg.align` for those.

    Args:
        model: The mixture to reorder: a path, a hub id or an open checkpoint.
        reference: The mixture whose order it gets.

    Returns:
        The model as a checkpoint, reordered as it is read; `orders` has the old place of every expert of a layer.

    Raises:
        InputError: If there are no experts, or the mixtures differ in their layers; before any weights are read.

    Example:
        >>> mg.save(mg.surgery.match_experts("mixtral-b", "mixtral-a"), "out/")  # doctest: +SKIP
    """
    target, source = open_checkpoint(reference), open_checkpoint(model)
    for each in (target, source):
        refuse_quantised(each, ())
        _refuse_grouped(each)
    layers = find_experts(target)
    if not layers:
        raise InputError(f"{target.label} has no experts to match")
    source = in_layout_of(target, source)
    for layer in layers:
        for name in _names(layer):
            if name not in source or source.spec(name).shape != target.spec(name).shape:
                found = source.spec(name) if name in source else "missing"
                raise InputError(
                    f"{name!r} is {target.spec(name)} in {target.label} and {found} in {source.label}: experts can be "
                    "matched only if both have the same number of them, of the same sizes"
                )
    orders = {layer.name: assign(_agreement(target, source, layer)) for layer in layers}
    return MatchedExperts(source, layers, orders, target.label)


def find_experts(checkpoint: Checkpoint) -> list[ExpertLayer]:
    """Find the layers of experts of a checkpoint by the names of its tensors."""
    layers: dict[str, ExpertLayer] = {}
    for name in checkpoint.names():
        if found := _SINGLE.fullmatch(name):
            layer = layers.setdefault(found[1], ExpertLayer(found[1]))
            layer.single.setdefault(found[3], {})[int(found[2])] = name
            layer.count = max(layer.count, int(found[2]) + 1)
        elif (found := _FUSED.fullmatch(name)) and len(checkpoint.spec(name).shape) > 1:
            layer = layers.setdefault(found[1], ExpertLayer(found[1]))
            layer.fused.append(name)
            layer.count = checkpoint.spec(name).shape[0]
    for layer in layers.values():
        parent = layer.name.removesuffix("experts")
        for name in checkpoint.names():
            beside = name.startswith(parent) and _ROUTER.fullmatch(name.removeprefix(parent))
            if beside and checkpoint.spec(name).shape[:1] == (layer.count,):
                layer.fused.append(name)
                layer.router.append(name)
    for layer in layers.values():
        if any(len(names) != layer.count for names in layer.single.values()) or not layer.router:
            what = "some experts lack tensors that others have" if layer.router else "there is no router beside them"
            raise InputError(f"{checkpoint.label}: the experts of {layer.name!r} cannot be matched: {what}")
    return list(layers.values())


class MatchedExperts(View):
    """A mixture with its experts in another order; `orders` has the old place of each expert, by layer."""

    def __init__(
        self, source: Checkpoint, layers: Sequence[ExpertLayer], orders: Mapping[str, Index], reference: str
    ) -> None:
        super().__init__(source, f"{source.label} with experts as in {reference}")
        self.orders = dict(orders)
        self._renamed = {
            name: names[int(orders[layer.name][place])]
            for layer in layers
            for names in layer.single.values()
            for place, name in names.items()
        }
        self._reordered = {name: orders[layer.name] for layer in layers for name in layer.fused}

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        name = self.aliases().get(name, name)
        if name in self._renamed:
            return self.source.read(self._renamed[name], rows)
        if name in self._reordered:
            first, last = rows or (0, len(self._reordered[name]))
            return gather(self.source, name, self._reordered[name][first:last])
        return self.source.read(name, rows)

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        if name not in self._reordered:
            self.source.prefetch(self._renamed.get(name, name), rows)

    def overhead(self, name: str, entries: int) -> int:
        """Fused experts are gathered: the rows that are read together, and as they are joined."""
        return super().overhead(name, entries) + (2 * self.spec(name).nbytes if name in self._reordered else 0)

    def fingerprint(self) -> str:
        orders = "".join(f"{layer} {order.tolist()}\n" for layer, order in sorted(self.orders.items()))
        return hashlib.sha256(f"{super().fingerprint()}\n{orders}".encode()).hexdigest()

    def lineage(self) -> Lineage:
        return Lineage(models=(self.source.label,), methods=("match-experts",))


def _refuse_grouped(checkpoint: Checkpoint) -> None:
    config: Mapping[str, Any] = read_config(checkpoint.directory)
    if int(config.get("n_group") or 1) > 1:
        raise InputError(
            f"{checkpoint.label} chooses experts in groups (n_group: {config['n_group']}): they have no free order"
        )


def _names(layer: ExpertLayer) -> list[str]:
    return [*(name for names in layer.single.values() for name in names.values()), *layer.fused]


def _agreement(target: Checkpoint, source: Checkpoint, layer: ExpertLayer) -> np.ndarray:
    """⟨W_ref[e], W_model[f]⟩ of all pairs of experts, in pieces."""
    total = torch.zeros((layer.count, layer.count), dtype=torch.float64)
    for names in layer.single.values():
        ordered = [names[place] for place in range(layer.count)]
        shape = target.spec(ordered[0]).shape
        step = max(1, _CHUNK // (layer.count * max(1, int(np.prod(shape[1:])))))
        for start in range(0, shape[0], step):
            rows = (start, min(start + step, shape[0]))
            a, b = (torch.stack([c.read(n, rows).float().flatten() for n in ordered]) for c in (target, source))
            total += (a @ b.T).double()
    for name in layer.fused:
        a, b = (c.read(name).reshape(layer.count, -1) for c in (target, source))
        for start in range(0, a.shape[1], step := max(1, _CHUNK // layer.count)):
            total += (a[:, start : start + step].float() @ b[:, start : start + step].float().T).double()
    found: np.ndarray = total.numpy()
    return found
