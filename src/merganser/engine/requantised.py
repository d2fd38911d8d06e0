"""The result of a merge, quantised as it is written, with the quantisation error of every layer."""

from __future__ import annotations

import mmap
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, Rows, View
from merganser.checkpoints.sidecars import Sidecars
from merganser.engine.merge import Merge
from merganser.engine.plan import Model, Output
from merganser.errors import InputError
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

#: Rows of a tensor that are sampled to measure how well it quantises alone.
_SAMPLE = 64


@dataclass(frozen=True)
class LayerError:
    """The quantisation error of a layer.

    Attributes:
        layer: The layer's number, or "rest".
        merged: ‖Q(w) - w‖ / ‖w‖ over the merged weights of the layer.
        alone: The same for the first model's weights, from a sample of rows; None if it has none of them.
    """

    layer: str
    merged: float
    alone: float | None


class Requantised(View):
    """The result of a merge with some of its weights as codes.

    Args:
        merged: The result of the merge.
        rows: The quantised weights, with their numbers of rows.
        first: The first model of the merge, whose weights are quantised for comparison.
    """

    def __init__(self, merged: Checkpoint, rows: Mapping[str, int], first: Checkpoint) -> None:
        super().__init__(merged, merged.label)
        self.ledger = Ledger(rows)
        self.first = first

    @abstractmethod
    def encode(self, name: str, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes of rows of a weight, the scale of each row, and the decoded values."""

    def encode_rows(self, name: str, rows: Rows, values: Tensor) -> Tensor:
        """Return the codes of some rows of a weight, and record their error."""
        self.check(name, values)
        codes, scales, decoded = self.encode(name, values)
        if not bool(decoded.isfinite().all()):
            raise InputError(
                f"{name!r} of the merge has values up to {float(values.abs().max()):.3g}, too large to quantise"
            )
        self.ledger.note(name, rows, scales, (decoded - values).square().sum(1), values.square().sum(1))
        return codes

    def check(self, name: str, values: Tensor) -> None:
        """Refuse values that no code can represent."""
        if not bool(values.isfinite().all()):
            raise InputError(f"{name!r} of the merge contains NaN or infinite values, which cannot be quantised")

    def overhead(self, name: str, entries: int) -> int:
        return 16 * entries + self.source.overhead(name, entries)

    def errors(self) -> list[LayerError]:
        """Return the quantisation error of the weights written so far, by layer."""
        merged: dict[str, list[tuple[float, float]]] = {}
        alone: dict[str, list[tuple[float, float]]] = {}
        for name in self.ledger.names():
            layer = found[1] if (found := re.search(r"(?:^|\.)(\d+)\.", name)) else "rest"
            if (sums := self.ledger.sums(name)) is not None:
                merged.setdefault(layer, []).append(sums)
            if (values := self.sample(name, _SAMPLE)) is not None:
                decoded = self.encode(name, values)[2]
                error, norm = float((decoded - values).square().sum()), float(values.square().sum())
                alone.setdefault(layer, []).append((error, norm))
        return [
            LayerError(layer, _ratio(sums), _ratio(alone[layer]) if layer in alone else None)
            for layer, sums in merged.items()
        ]

    def sample(self, name: str, count: int) -> Tensor | None:
        """Return a few rows of the first model's weight in float32; None if it does not have it."""
        if name not in self.first or not self.first.spec(name).element.is_floating_point:
            return None
        return self.first.read(name, (0, min(count, self.first.spec(name).shape[0]))).to(torch.float32)


class Ledger:
    """Scale, squared error and squared norm of every quantised row, in memory that forked workers share."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        self._places: dict[str, slice] = {}
        total = 0
        for name, count in rows.items():
            self._places[name] = slice(total, total + count)
            total += count
        self._map = mmap.mmap(-1, max(1, total) * 12)
        self._rows = np.frombuffer(self._map, np.float32).reshape(-1, 3)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def names(self) -> Sequence[str]:
        """Return the quantised weights."""
        return list(self._places)

    def note(self, name: str, rows: Rows, scales: Tensor, errors: Tensor, norms: Tensor) -> None:
        """Store the statistics of some rows; a scale is never 0."""
        start = self._places[name].start
        kept = torch.stack([scales, errors, norms], 1)
        self._rows[start + rows[0] : start + rows[1]] = kept.numpy()

    def scales(self, name: str) -> Tensor | None:
        """Return the scales of all rows of a weight; None if some are not known yet."""
        found = self._rows[self._places[name], 0]
        return torch.from_numpy(found.copy()) if (found > 0).all() else None

    def sums(self, name: str) -> tuple[float, float] | None:
        """Return the squared error and norm over the known rows of a weight; None if there are none."""
        found = self._rows[self._places[name]].astype(np.float64)
        return (float(found[:, 1].sum()), float(found[:, 2].sum())) if (found[:, 0] > 0).any() else None


def replace_by_codes(
    merge: Merge, view: Requantised, outputs: Sequence[Output], sidecars: Sidecars, note: str
) -> Merge:
    """Return the merge that writes a view of another merge's result, with sidecars of that merge's models."""
    plan = merge.plan
    moved = replace(sidecars.tokenizer, model=sidecars.tokenizer.model + 1)
    quantised = replace(
        plan,
        models=(Model(plan.models[0].label, plan=plan), *plan.models),
        outputs=tuple(outputs),
        sidecars=replace(sidecars, tokenizer=moved),
        notes=(*plan.notes, note),
    )
    return Merge(quantised, (view, *merge.sources), quantises=merge)


def _ratio(sums: Sequence[tuple[float, float]]) -> float:
    error, norm = (sum(each[i] for each in sums) for i in (0, 1))
    return float((error / norm) ** 0.5) if norm else 0.0
