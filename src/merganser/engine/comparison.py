"""Compare the blocks of an output with its sources while they are merged, for the record of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine import fused
from merganser.engine.blocks import Piece
from merganser.engine.changes import LEAST, Change, compare_sample, conclude, is_looked_at, is_small, sample
from merganser.engine.plan import Output
from merganser.methods.base import Group

if TYPE_CHECKING:
    from torch import Tensor


class Comparison:
    """The statistics of the blocks of one output.

    Args:
        output: The output.
        spans: All of its blocks.
    """

    def __init__(self, output: Output, spans: Sequence[Sequence[Piece]]) -> None:
        self._output = output
        self._spans = spans
        #: Statistics of blocks by offset.
        self._seen: dict[int, list[float]] = {}

    def add(self, block: Piece, group: Group, made: Tensor) -> None:
        """Compare a block that torch computed with what it was computed from."""
        if self._is_wanted(block):
            base = () if group.base is None else (group.base,)
            rows = [sample(tensor) for tensor in (*group.models, *base, made)]
            self._seen[block.offset] = compare_sample(rows, group.base is not None)

    def add_compiled(self, block: Piece, addresses: fused.Addresses, made: StoredEntries) -> None:
        """Compare a block that was computed by the compiled runner."""
        with_base = self._output.base is not None
        if not self._is_wanted(block):
            return
        if is_small(self._output.spec.numel):
            rows = [each.numbers() for each in (*addresses.rows(block), made)]
            self._seen[block.offset] = compare_sample(rows, with_base)
        else:
            self._seen[block.offset] = fused.find_change(addresses, with_base, block, made)

    def change(self, sources: Sequence[Checkpoint]) -> Change:
        """Return the change of the output, once every block is computed."""
        output, parents = self._output, tuple(source.model for source in self._output.inputs)
        if output.copies:
            same = sources[parents[0]].spec(output.inputs[0].name).element == output.spec.element
            return Change("copied" if same else "cast", output.spec.numel, parents)
        seen = [self._seen[offset] for offset in sorted(self._seen)]
        return conclude(output.method, output.spec.numel, parents, output.base is not None, seen)

    def _is_wanted(self, block: Piece) -> bool:
        large = self._output.spec.numel >= LEAST and not self._output.copies
        return large and is_looked_at(self._spans, block)
