"""Compute any part of one output of a merge."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from merganser.checkpoints.base import read_entries
from merganser.checkpoints.dtypes import Element
from merganser.checkpoints.reads import StoredRead, file_of, noting_reads
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine import fused
from merganser.engine.blocks import SPAN, Piece, bounds, cut_entries, join, spans, take
from merganser.engine.changes import Change
from merganser.engine.comparison import Comparison
from merganser.engine.footprint import footprint
from merganser.engine.kept import Kept
from merganser.engine.merge import Merge
from merganser.engine.plan import Output, Source
from merganser.engine.preparation import Preparation, Preparing, prepare_methods
from merganser.engine.ranges import check_input, check_result
from merganser.engine.running_digests import SourceDigests
from merganser.engine.tensor_blocks import Mapper, TensorBlocks, serial
from merganser.engine.thinning import continue_from_kept
from merganser.methods.base import Group

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Arithmetic:
    """How to compute, as opposed to what. Nothing here changes a bit of a finite result on one device."""

    device: str = "cpu"
    allow_nan: bool = False
    #: Whether to record what the merge changes, for sinks that keep it.
    changes: bool = False
    #: The digest that records which stored tensors were read, for sinks that keep it (`checkpoints.digests`).
    digest: str | None = None
    #: What is kept from merge to merge of the same sources.
    kept: Kept | None = None


class Computations:
    """The computations of all outputs of a merge.

    `prepared` holds, by method name, the global state that some rules compute from all tensors before the first merge.
    It is computed when first needed, unless given.
    """

    def __init__(
        self, merge: Merge, settings: Arithmetic | None = None, prepared: Mapping[str, Preparation] | None = None
    ) -> None:
        self.merge = merge
        self.settings = settings or Arithmetic()
        #: Recordings that serve every output with the same rule, by purpose, rule and whether there is a base.
        self.recordings: dict[tuple[str, int, bool], fused.Recorded] = {}
        self._digested: set[StoredRead] = set()
        self._lock = threading.Lock()
        if prepared is not None:
            self.prepared = prepared

    def of(self, output: Output) -> Computation:
        """Return the computation of one output."""
        return Computation(self, output, self.prepared.get(output.method))

    def digest(self, reads: Iterable[StoredRead], known: Mapping[StoredRead, str]) -> dict[str, dict[str, str]]:
        """Return the digests of stored tensors that were not requested before, by file and name."""
        if self.settings.digest is None:
            return {}
        with self._lock:
            fresh = [read for read in reads if read not in self._digested]
            self._digested.update(fresh)
        found: dict[str, dict[str, str]] = {}
        for checkpoint, name in fresh:
            digest = known.get((checkpoint, name)) or checkpoint.digest(name, self.settings.digest)
            found.setdefault(file_of(checkpoint), {})[name] = digest
        return found

    @cached_property
    def prepared(self) -> Mapping[str, Preparation]:
        tensors: dict[str, list[Preparing]] = {}
        for output in self.merge.plan.outputs:
            rule = self.merge.rule(output)
            if not rule.copies and rule.method.looks_first:
                blocks = partial(self._blocks, output)
                tensors.setdefault(output.method, []).append((rule.method, output.parameters, blocks))
        return prepare_methods(tensors)

    def _blocks(self, output: Output, preparation: Preparation) -> TensorBlocks:
        return TensorBlocks(Computation(self, output, preparation))


class Computation:
    """The computation of one output of a merge."""

    def __init__(self, among: Computations, output: Output, preparation: Preparation | None = None) -> None:
        self.plan = among.merge.plan
        self.output = output
        self.sources = among.merge.sources
        self.settings = among.settings
        self._among = among
        self._reads_noted: dict[StoredRead, None] = {}
        self._digests = SourceDigests(self.settings.digest) if self.settings.digest else None
        self.shape = output.spec.shape
        rule = among.merge.rule(output)
        self.method, self.labels, self.copies = rule.method, rule.labels, rule.copies
        #: Gains, for tensors whose rule uses them.
        given = preparation or Preparation()
        self.preparation = given if self.method.equalizes else Preparation(given.state)
        self.whole = rule.whole
        self._held: list[tuple[Piece, Group]] | None = None
        #: A state and the recording of merging with it, shared by the spans of a tensor.
        self._merging: tuple[Any, fused.Recorded | None] | None = None
        self._comparison = Comparison(output, self.spans) if self.settings.changes else None

    @cached_property
    def spans(self) -> list[list[Piece]]:
        if not self.whole:
            return spans(self.shape)
        numel = self.output.spec.numel
        return [[Piece(0, self.shape[0] if self.shape else 1, 0, numel)]]

    @cached_property
    def element(self) -> Element:
        """Return the dtype of the arithmetic."""
        return self._among.merge.arithmetic(self.output)

    def footprint(self, entries: int = SPAN) -> int:
        """Return the working memory in bytes that a task may hold when it reads `entries` at once."""
        return footprint(self._among.merge, self.output, entries)

    def state(self, mapper: Mapper = serial) -> Any:
        """Return the state that the rule computes from the whole tensor before any part of it can be merged."""
        if self.copies or self.method.reach != "reduce_map":
            return None
        single = len(self.spans) == len(self.spans[0]) == 1
        if single and not self._recordable:  # read and widened once for the reduction and the merge
            self._held = list(self.groups(self.spans[0]))
        kept, cause = self.settings.kept, self.cause_of(self.method.reduced_by())
        if kept is None or cause is None:
            return self.method.reduce(TensorBlocks(self, mapper))
        return kept.state(self.output.name, cause, lambda: self.method.reduce(TensorBlocks(self, mapper)))

    def cause_of(self, parameters: Hashable) -> Any:
        """Return everything that a result with these parameters depends on if the sources stay the same; None if that
        includes other tensors.
        """
        if self.method.looks_first:
            return None
        read = [(str(self.plan.models[source.model].path), source.name) for source in self.output.reads]
        return parameters, read, self.labels, self.plan.seed

    def merge(self, span: list[Piece], state: Any) -> Iterator[tuple[Piece, Tensor]]:
        """Yield the merged blocks of a span, computed by torch, in the dtype of the arithmetic."""
        return ((block, made) for block, _, made in self._merged(span, state))

    def _merged(self, span: list[Piece], state: Any) -> Iterator[tuple[Piece, Group | None, Tensor]]:
        """Yield the blocks of `merge`, each with what it was computed from; None for copies."""
        if self.copies:
            source = self.output.inputs[0]
            first, last = bounds(span)
            tensor = self.sources[source.model].read(source.name, (first, last))
            for block in span:
                yield block, None, take(tensor, block, first)
            return
        for block, group in self.groups(span):
            yield block, group, self.method.merge(group, state)
        self._held = None

    def results(
        self, span: list[Piece], state: Any, place: StoredEntries | None = None
    ) -> Iterator[tuple[Piece, StoredEntries]]:
        """Yield the blocks of a span in the output's dtype. Use each before requesting the next.

        With `place`, the entries of the output that they are for, blocks are computed into it where that is possible.
        """
        element = self.output.spec.element
        if self.copies:
            source, rows = self.output.inputs[0], bounds(span)
            stored = self.sources[source.model].read_stored(source.name, rows)
            if stored is None or stored.element == element:
                yield from self._finished(span, state) if stored is None else cut_entries(stored, span, self.shape)
                return
        recorded, addresses = continue_from_kept(self, span, state) or self._compiled(span, state)
        if recorded is None or addresses is None:
            yield from self._finished(span, state)
            return
        noted = self._comparison or self._digests
        # Half of a source must not be overwritten if torch has to compute the rest from it.
        if place is not None and not noted and fused.can_store(place, element) and not addresses.overlap(place):
            whole = join(span)  # one pass: what is stored does not depend on blocks
            out = place[whole.offset : whole.offset + whole.numel]
            done = fused.store(recorded, addresses, whole, out, element)
            yield from [(whole, out)] if done else self._finished(span, state)
            return
        room = StoredEntries.empty(max(block.numel for block in span), element)
        for block in span:
            out = room if len(room) == block.numel else room[: block.numel]
            if not fused.store(recorded, addresses, block, out, element):
                yield from self._finished([block], state)
                continue
            if self._comparison:
                self._comparison.add_compiled(block, addresses, out)
            if self._digests:
                self._digests.add(block)
            yield block, out
        self._held = None

    def _finished(self, span: list[Piece], state: Any) -> Iterator[tuple[Piece, StoredEntries]]:
        """Yield the blocks of a span computed by torch, in the output's dtype."""
        for block, group, tensor in self._merged(span, state):
            made = self.finish(tensor)
            if self._comparison and group is not None:
                self._comparison.add(block, group, made)
            yield block, StoredEntries.of(made)

    def noting(self) -> AbstractContextManager[None]:
        """Record the stored tensors that this thread reads inside the block, for `digests`."""
        return nullcontext() if self.settings.digest is None else noting_reads(self._reads_noted)

    def digests(self) -> dict[str, dict[str, str]]:
        """Return the digests of stored tensors that no earlier output used, by file and name."""
        return self._among.digest(self._reads_noted, self._digests.finish()) if self._digests else {}

    def change(self) -> Change | None:
        """Return the change of the tensor, once every block is computed; None if changes are not recorded."""
        return self._comparison.change(self.sources) if self._comparison else None

    @cached_property
    def _recordable(self) -> bool:
        plain = not (self.whole or self.output.statistics) and self.element.name == "float32"
        return plain and self.settings.device == "cpu" and fused.is_possible(self.output.spec.element, self.shape)

    def record(self, function: Callable[[Group], Any], stores: bool = False) -> fused.Recorded | None:
        """Record a function of the blocks of this output for compiled execution; None if torch must run it."""
        if not self._recordable:
            return None
        about = self._about | {"models": len(self.output.inputs), "base": self.output.base is not None}
        return fused.record(function, about, stores)

    def record_shared(self, function: Callable[[Group], Tensor], purpose: str) -> fused.Recorded | None:
        """Record a function that needs no state, or return its recording for another output with the same rule."""
        key = (purpose, id(self.method), self.output.base is not None)
        known = self._among.recordings.get(key) if self._recordable else None
        if known is None:
            known = self.record(function, stores=True)
            if known is not None and not known.specific:
                self._among.recordings[key] = known
        return known

    def _compiled(self, span: list[Piece], state: Any) -> tuple[fused.Recorded | None, fused.Addresses | None]:
        """Return the recording of the rule, and the addresses of what it reads in this span."""
        if self._merging is None or self._merging[0] is not state:
            merge: Callable[[Group], Tensor] = lambda group: self.method.merge(group, state)  # noqa: E731
            self._merging = state, self.record_shared(merge, "merge") if state is None else self.record(merge, True)
        return self._merging[1], self.addresses(span) if self._merging[1] else None

    def addresses(self, span: list[Piece]) -> fused.Addresses | None:
        """Read the rows of a span, and return their addresses; None if they cannot be used in place."""
        first, last = bounds(span)
        rows = [read_entries(self.sources[source.model], source.name, (first, last)) for source in self.output.reads]
        origin = first * math.prod(self.shape[1:])
        if self._digests:
            self._digests.follow(self._reads_noted, rows, origin)
        return fused.Addresses.of(rows, origin)

    @property
    def _about(self) -> dict[str, Any]:
        """Return the fields of a group that all blocks share."""
        gains = self.preparation.gains
        return {
            "name": self.output.name,
            "labels": self.labels,
            "shape": self.shape,
            "seed": self.plan.seed,
            "prepared": self.preparation.state,
            "gains": tuple(gains.get(label, 1.0) for label in self.labels) if gains else (),
        }

    def finish(self, tensor: Tensor) -> Tensor:
        """Cast once, at the end, to the output's dtype."""
        narrow = tensor.to(self.output.spec.dtype)
        if not self.settings.allow_nan and tensor.is_floating_point() and narrow.is_floating_point():
            check_result(tensor, narrow, self.output.name, None if self.copies else self.output.method)
        return narrow.cpu().contiguous()

    def prefetch(self, span: list[Piece]) -> None:
        """Let the sources read ahead the data of a span."""
        rows = bounds(span) if self.shape else None
        for source in self.output.reads:
            self.sources[source.model].prefetch(source.name, rows)

    def groups(self, span: list[Piece]) -> Iterator[tuple[Piece, Group]]:
        if self._held is not None and span == self.spans[0]:
            yield from self._held
            return
        first, last = bounds(span)
        rows = (first, last) if self.shape else None
        tensors = [self.sources[s.model].read(s.name, rows) for s in self.output.reads]
        sides = {kind: [self._side(s, rows) for s in each] for kind, each in self.output.statistics.items()}
        for block in span:
            parts = [self._widen(take(t, block, first), s) for t, s in zip(tensors, self.output.reads, strict=True)]
            base = parts.pop() if self.output.base else None
            yield (
                block,
                Group(
                    **self._about,
                    models=tuple(parts),
                    base=base,
                    offset=block.offset,
                    statistics={
                        kind: tuple(
                            self._widen(take(side, block, first) if cut else side, source)
                            for (side, cut), source in zip(each, self.output.statistics[kind], strict=True)
                        )
                        for kind, each in sides.items()
                    },
                    finite=not self.settings.allow_nan,
                ),
            )

    def _side(self, source: Source, rows: tuple[int, int] | None) -> tuple[Tensor, bool]:
        """Return a statistic, and whether it was split like the tensor; one of another shape is read whole."""
        checkpoint = self.sources[source.model]
        cut = checkpoint.spec(source.name).shape == self.shape
        return checkpoint.read(source.name, rows if cut else None), cut

    def _widen(self, tensor: Tensor, source: Source) -> Tensor:
        wide = tensor.to(device=self.settings.device, dtype=self.element.dtype)
        if not self.settings.allow_nan:
            squares = self.method.reach != "elementwise"
            label = self.plan.models[source.model].label
            check_input(wide, label, source.name, self.output.method if squares else None)
        return wide
