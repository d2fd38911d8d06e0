"""Find the layers of a mixture of experts by names, and view a mixture with its experts in another's order."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, View, hash_text
from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.gguf_config import model_config
from merganser.checkpoints.quantised import refuse_quantised
from merganser.checkpoints.reads import noting_reads
from merganser.checkpoints.recent import Recent
from merganser.checkpoints.row_runs import gather
from merganser.errors import CheckpointError
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

    from merganser.kernels.linear_assignment import Index

_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_FUSED = re.compile(r"(.+\.experts)\.([^.]*[A-Za-z][^.]*(?:\.weight|\.bias)?)")
_ROUTER = re.compile(r"(gate|router|moe_statics)(\..+)?|e_score_correction_bias|expert_bias")
#: Names of tensors that may have as many entries as there are experts, but do not belong to them.
_OTHER = re.compile(r"^experts\.|shared|norm|attention|attn")
_CHUNK = 1 << 22


@dataclass
class ExpertLayer:
    """The tensors of one layer of experts.

    Attributes:
        name: What its tensors' names begin with, e.g. "model.layers.0.mlp.experts".
        single: Part -> the names of that part in every expert, where experts are stored one by one.
        fused: Names of tensors with the experts along their first axis (experts stored together, the router) or as
            columns of one row (ERNIE's correction of scores).
        router: Those of the fused names that belong to the router.
    """

    name: str
    single: dict[str, dict[int, str]] = field(default_factory=dict)
    fused: list[str] = field(default_factory=list)
    router: list[str] = field(default_factory=list)
    count: int = 0

    @property
    def names(self) -> list[str]:
        return [*self.fused, *(name for own in self.single.values() for name in own.values())]


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
        for name in (name for name in checkpoint.names() if name.startswith(parent)):
            inside, shape = name.removeprefix(parent), checkpoint.spec(name).shape
            if _ROUTER.fullmatch(inside) and (shape[:1] == (layer.count,) or shape == (1, layer.count)):
                layer.fused.append(name)
                layer.router.append(name)
            elif math.prod(shape) == layer.count and not _OTHER.search(inside):
                raise CheckpointError(
                    f"{checkpoint.label}: {name!r} seems to have a number for each expert, but its meaning is not "
                    "known: the experts cannot be reordered without it"
                )
    for layer in layers.values():
        if any(len(names) != layer.count for names in layer.single.values()) or not layer.router:
            what = "some experts lack tensors that others have" if layer.router else "there is no router beside them"
            raise CheckpointError(f"{checkpoint.label}: the experts of {layer.name!r} cannot be matched: {what}")
    return list(layers.values())


class MatchedExperts(View):
    """A mixture with its experts in the order of another's; its function does not change.

    The order of a layer maximises Σ_e ⟨W_ref[e], W_model[π(e)]⟩ over the weights of the experts and their rows of the
    router: one linear assignment, made when a tensor of that layer is read for the first time.

    Args:
        source: The mixture to reorder, in the layout of the reference.
        reference: The mixture whose order it gets.

    Raises:
        CheckpointError: There are no experts, or the mixtures differ in their layers. No weights are read.
    """

    def __init__(self, source: Checkpoint, reference: Checkpoint) -> None:
        super().__init__(source, f"{source.label} with experts as in {reference.label}")
        self.reference = reference
        for each in (reference, source):
            refuse_quantised(each, ())
            _refuse_grouped(each)
        self.layers = {layer.name: layer for layer in find_experts(reference)}
        if not self.layers:
            raise CheckpointError(
                f"{reference.label} has no experts to match: expected tensors named ….experts.0.… or ….experts.…"
            )
        #: Names -> the layer they belong to and, of experts stored one by one, their part and place.
        self._places: dict[str, tuple[ExpertLayer, str | None, int]] = {}
        for layer in self.layers.values():
            self._places |= dict.fromkeys(layer.fused, (layer, None, 0))
            self._places |= {name: (layer, part, e) for part, own in layer.single.items() for e, name in own.items()}
        for name in {**self._places, **dict.fromkeys(n for layer in find_experts(source) for n in layer.names)}:
            specs = [each.spec(name) if name in each else None for each in (reference, source)]
            if len({spec and spec.shape for spec in specs}) > 1:
                wanted, found = (spec or "missing" for spec in specs)
                raise CheckpointError(
                    f"{name!r} is {wanted} in {reference.label} and {found} in {source.label}: experts "
                    "can be matched only if both have the same number of them, of the same sizes"
                )
        self._orders: Recent[Index] = Recent()

    @property
    def orders(self) -> dict[str, Index]:
        """Return the old index of every expert, by layer."""
        return {name: self._order(layer) for name, layer in self.layers.items()}

    def _order(self, layer: ExpertLayer) -> Index:
        return self._orders.get(layer.name, lambda: self._find_order(layer))

    def _find_order(self, layer: ExpertLayer) -> Index:
        from merganser.kernels.linear_assignment import assign

        with noting_reads({}):  # which expert goes where is no part of the tensor that is being read
            return assign(_measure_agreement(self.reference, self.source, layer))

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        name = self.resolve_alias(name)
        if name not in self._places:
            return self.source.read(name, rows)
        layer, part, place = self._places[name]
        order = self._order(layer)
        if part is not None:
            return self.source.read(layer.single[part][int(order[place])], rows)
        if self.spec(name).shape[0] != layer.count:
            return self.source.read(name, rows)[:, torch.from_numpy(order)]
        first, last = rows or (0, layer.count)
        return gather(self.source, name, order[first:last])

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        if name not in self._places:
            self.source.prefetch(name, rows)

    def overhead(self, name: str, entries: int) -> int:
        """Return the bytes of matching a layer, and of fused experts while they are gathered."""
        found = super().overhead(name, entries)
        if name not in self._places:
            return found
        layer, part, _ = self._places[name]
        both = (self.source, self.reference)
        whole = max((sum(each.spec(own).nbytes for each in both) for own in layer.fused), default=0)
        return found + whole + 2 * 4 * _CHUNK + (0 if part else 2 * self.spec(name).nbytes)

    def fingerprint(self) -> str:
        own = f"{self.source.fingerprint()}\nexperts as in {self.reference.fingerprint()}"
        return hash_text(own)

    def lineage(self) -> Lineage:
        return Lineage(models=(self.source.label,), methods=("match-experts",))


def _refuse_grouped(checkpoint: Checkpoint) -> None:
    config: Mapping[str, Any] = model_config(checkpoint)
    if int(config.get("n_group") or 1) > 1:
        raise CheckpointError(
            f"{checkpoint.label} chooses experts in groups (n_group: {config['n_group']}): so their order is not free"
        )


def _measure_agreement(target: Checkpoint, source: Checkpoint, layer: ExpertLayer) -> np.ndarray:
    """Return ⟨W_ref[e], W_model[f]⟩ of all pairs of experts, computed in pieces."""
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
