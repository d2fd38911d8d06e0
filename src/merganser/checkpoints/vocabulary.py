"""A checkpoint seen through another vocabulary: rows of its embeddings and heads gathered, moved and filled in.

A `VocabularyMap` says which rows, as data that a plan can hold; `Remapped` is the view.
"""

from __future__ import annotations

import functools
import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_MEAN_ROWS = 4096


@dataclass(frozen=True)
class RowRun:
    """`count` consecutive rows: row k is the mean of the rows `row + k` of its sources (model, row).

    Without any source the rows are zero; None instead of sources takes the mean row of the model itself.
    """

    count: int
    sources: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True)
class VocabularyMap:
    """Where the rows of a model's vocabulary tensors come from.

    Attributes:
        tensors: The names of the same tensor in every model of the plan, by its name in this model.
        runs: The rows of the output, in order.
    """

    tensors: Mapping[str, tuple[str, ...]]
    runs: tuple[RowRun, ...]

    @property
    def rows(self) -> int:
        """The number of rows of the output."""
        return sum(run.count for run in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """Return the map as JSON-serialisable values; a run is `[count, sources]`, or `[count, "mean"]`."""
        runs = [[run.count, "mean" if run.sources is None else list(map(list, run.sources))] for run in self.runs]
        tensors = {name: list(names) for name, names in self.tensors.items()}
        return {"tensors": tensors, "rows": self.rows, "segments": runs}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VocabularyMap:
        """Return the map of which `to_dict` gave the values."""
        runs = (
            RowRun(count, None if sources == "mean" else tuple((model, row) for model, row in sources))
            for count, sources in data["segments"]
        )
        return cls({name: tuple(names) for name, names in data["tensors"].items()}, tuple(runs))


class Remapped(View):
    """`source` with its vocabulary tensors made of the rows of a map; `models` are the plan's, unmapped."""

    def __init__(self, source: Checkpoint, remap: VocabularyMap, models: Sequence[Checkpoint]) -> None:
        super().__init__(source, source.label)
        self._models = models
        self._tensors = remap.tensors
        self._runs = remap.runs
        self._starts = [0, *accumulate(run.count for run in self._runs)]
        self._rows = self._starts[-1]
        self._identity = hashlib.sha256(json.dumps(remap.to_dict(), sort_keys=True).encode()).hexdigest()
        self._means: dict[str, Tensor] = {}

    def spec(self, name: str) -> TensorSpec:
        spec = self.source.spec(name)
        if self._stored(name) is None:
            return spec
        return TensorSpec((self._rows, *spec.shape[1:]), spec.dtype)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        stored = self._stored(name)
        if stored is None:
            return self.source.read(name, rows)
        first, last = rows or (0, self._rows)
        last = min(last, self._rows)
        spec = self.source.spec(name)
        if first >= last:
            return torch.empty((0, *spec.shape[1:]), dtype=self._width(stored), device="cpu")
        parts = []
        run = bisect_right(self._starts, first) - 1
        while run < len(self._runs) and self._starts[run] < last:
            start, stop = max(first, self._starts[run]), min(last, self._starts[run + 1])
            if start < stop:
                parts.append(self._part(stored, spec, self._runs[run], start - self._starts[run], stop - start))
            run += 1
        return torch.cat([part.to(self._width(stored)) for part in parts])

    def fingerprint(self) -> str:
        parts = [self._identity, self.source.fingerprint(), *(model.fingerprint() for model in self._models)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        if self._stored(name) is None:
            self.source.prefetch(name, rows)

    def _stored(self, name: str) -> str | None:
        name = self.aliases().get(name, name)
        return name if name in self._tensors else None

    def _width(self, name: str) -> torch.dtype:
        """One dtype for all rows of a tensor, means unrounded: float32, or float64 where a model has it."""
        dtypes = (model.spec(own).dtype for model, own in zip(self._models, self._tensors[name], strict=True))
        return functools.reduce(torch.promote_types, dtypes, torch.float32)

    def _part(self, name: str, spec: TensorSpec, run: RowRun, offset: int, count: int) -> Tensor:
        if run.sources is None:
            return self._mean(name, spec).expand(count, *spec.shape[1:])
        if not run.sources:
            return torch.zeros((count, *spec.shape[1:]), dtype=spec.dtype, device="cpu")
        found = [
            self._models[model].read(self._tensors[name][model], (row + offset, row + offset + count))
            for model, row in run.sources
        ]
        if len(found) == 1:
            return found[0]
        return torch.stack([tensor.to(self._width(name)) for tensor in found]).mean(0)

    def _mean(self, name: str, spec: TensorSpec) -> Tensor:
        if name not in self._means:
            total = torch.zeros(spec.shape[1:], dtype=torch.float64, device="cpu")
            for start in range(0, spec.shape[0], _MEAN_ROWS):
                stop = min(start + _MEAN_ROWS, spec.shape[0])
                total += self.source.read(name, (start, stop)).to(torch.float64).sum(0)
            self._means[name] = (total / max(1, spec.shape[0])).to(self._width(name))
        return self._means[name]
