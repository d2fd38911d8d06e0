"""A checkpoint seen through another vocabulary: rows of its embeddings and heads gathered, moved and filled in.

A remap is plain data (a plan can hold it):

- `tensors`: name -> the names of the same tensor in every model of the plan;
- `rows`: the number of rows of the output;
- `segments`: `[count, sources]` in order. Row k of a segment is the mean of rows `row + k` of its sources
  `[[model, row], …]`; no source means zero rows; `"mean"` instead of a list the mean row of this model itself.
"""

from __future__ import annotations

import functools
import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View

_MEAN_ROWS = 4096


class Remapped(View):
    """`source` with its vocabulary tensors made of the segments of a remap; `models` are the plan's, unmapped."""

    def __init__(self, source: Checkpoint, remap: Mapping[str, Any], models: Sequence[Checkpoint]) -> None:
        super().__init__(source, source.label)
        self._models = models
        self._tensors: Mapping[str, Sequence[str]] = remap["tensors"]
        self._rows: int = remap["rows"]
        self._segments: list[tuple[int, str | Sequence[Sequence[int]]]] = [
            (count, sources) for count, sources in remap["segments"]
        ]
        self._starts = [0, *accumulate(count for count, _ in self._segments)]
        self._identity = hashlib.sha256(json.dumps(remap, sort_keys=True).encode()).hexdigest()
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
        segment = bisect_right(self._starts, first) - 1
        while segment < len(self._segments) and self._starts[segment] < last:
            start, stop = max(first, self._starts[segment]), min(last, self._starts[segment + 1])
            if start < stop:
                parts.append(self._part(stored, spec, segment, start - self._starts[segment], stop - start))
            segment += 1
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

    def _part(self, name: str, spec: TensorSpec, segment: int, offset: int, count: int) -> Tensor:
        sources = self._segments[segment][1]
        if isinstance(sources, str):
            return self._mean(name, spec).expand(count, *spec.shape[1:])
        if not sources:
            return torch.zeros((count, *spec.shape[1:]), dtype=spec.dtype, device="cpu")
        found = [
            self._models[model].read(self._tensors[name][model], (row + offset, row + offset + count))
            for model, row in sources
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
