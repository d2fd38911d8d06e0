"""The result of a merge as a checkpoint. Nested merges are computed while they are read, never written."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, select_rows
from merganser.checkpoints.expert_orders import MatchedExperts
from merganser.checkpoints.grafting import Grafted
from merganser.checkpoints.layouts import convert_layout
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.checkpoints.vocabulary import Remapped
from merganser.engine.blocks import BLOCK, cut
from merganser.engine.compute import Arithmetic, Computation, Computations
from merganser.engine.merge import Merge, Open
from merganser.engine.plan import Plan
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def reopen(plan: Plan, open: Open = open_checkpoint) -> Merge:
    """Return the merge of a plan that was made in another process or on another machine."""
    plain: list[Checkpoint] = [
        Merged(reopen(model.plan, open), model.label) if model.plan else open(str(model.path)) for model in plan.models
    ]
    plain = [
        Grafted(plain[0], source, model.map)
        if model.map
        else convert_layout(plain[0], source)
        if model.layout
        else source
        for source, model in zip(plain, plan.models, strict=True)
    ]
    plain = [
        MatchedExperts(source, plain[0]) if model.experts else source
        for source, model in zip(plain, plan.models, strict=True)
    ]
    # Side checkpoints stand after the models and have no vocabulary.
    sizes = {len(names) for m in plan.models if m.vocabulary for names in m.vocabulary.tensors.values()}
    models = plain[: max(sizes, default=0)]
    sources = [
        Remapped(source, model.vocabulary, models) if model.vocabulary else source
        for source, model in zip(plain, plan.models, strict=True)
    ]
    return Merge(plan, sources)


class Merged(Checkpoint):
    """The result of a merge. Keeps the last decomposed tensor, which cannot be computed in parts."""

    def __init__(self, merge: Merge, label: str = "merge") -> None:
        self.plan = merge.plan
        self.sources = merge.sources
        self.label = label
        self.directory = self.sources[0].directory
        self._outputs = {output.name: output for output in self.plan.outputs}
        self._computations = Computations(merge, Arithmetic(allow_nan=True))  # the reader of the result checks for NaN
        self._lock = threading.RLock()
        self._states: dict[str, Any] = {}
        self._whole: tuple[str, Tensor] | None = None

    def names(self) -> Sequence[str]:
        return list(self._outputs)

    def spec(self, name: str) -> TensorSpec:
        name = self.plan.aliases.get(name, name)
        if name not in self._outputs:
            raise self.missing(name)
        return self._outputs[name].spec

    def aliases(self) -> Mapping[str, str]:
        return self.plan.aliases

    def fingerprint(self) -> str:
        return self.plan.identity([source.fingerprint() for source in self.sources])

    def files(self) -> Sequence[Path]:
        return [path for source in self.sources for path in source.files()]

    def overhead(self, name: str, entries: int) -> int:
        """Return the overhead of the merge, of its pieces beside the tensor, and of the kept decomposition."""
        computation = Computation(self._computations, self._outputs[self.plan.aliases.get(name, name)])
        if computation.whole:
            return computation.footprint()
        pieces = min(computation.output.spec.numel, entries) * computation.element.itemsize
        return computation.footprint(entries) + pieces + self._largest_whole

    @cached_property
    def _largest_whole(self) -> int:
        """Return the bytes of the largest tensor that may be kept."""
        made = (Computation(self._computations, output) for output in self.plan.outputs)
        return max((c.output.spec.numel * c.element.itemsize for c in made if c.whole), default=0)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        name = self.plan.aliases.get(name, name)
        if name not in self._outputs:
            raise self.missing(name)
        computation = self._computations.of(self._outputs[name])
        if computation.whole:
            return select_rows(self._read_whole(computation), rows)
        first, last = rows if rows and computation.shape else (0, computation.shape[0] if computation.shape else 1)
        state = self._state(computation)
        blocks = cut(computation.shape, BLOCK, (first, last))
        parts = [part.reshape(-1) for _, part in computation.merge(blocks, state)]
        shape = (last - first, *computation.shape[1:]) if computation.shape else ()
        return torch.cat(parts).view(shape)

    def _state(self, computation: Computation) -> Any:
        name = computation.output.name
        with self._lock:
            if name not in self._states:
                self._states[name] = computation.state()
            return self._states[name]

    def _read_whole(self, computation: Computation) -> Tensor:
        name = computation.output.name
        with self._lock:
            if self._whole is None or self._whole[0] != name:
                self._whole = None  # free it before the next
                ((_, tensor),) = computation.merge(computation.spans[0], None)
                self._whole = (name, tensor)
            return self._whole[1]
