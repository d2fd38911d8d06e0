"""Estimate the memory of a computation before it begins."""

from __future__ import annotations

from merganser.checkpoints.base import TensorSpec
from merganser.engine.blocks import BLOCK, SPAN
from merganser.engine.compute import Computation


def footprint(computation: Computation, entries: int = SPAN) -> int:
    """Return the working memory in bytes that a task of this computation may hold when it reads `entries` at once."""
    output, spec = computation.output, computation.output.spec
    reads = [*output.inputs, *([output.base] if output.base else []), *sum(output.statistics.values(), ())]
    entries = spec.numel if computation.whole else min(spec.numel, entries)
    nested = sum(computation.sources[source.model].overhead(source.name, entries) for source in reads)
    if computation.copies:
        return nested + entries * spec.element.itemsize
    wide = TensorSpec(spec.shape, computation.element)
    if computation.whole:
        return nested + wide.nbytes * (len(reads) + 1) + computation.method.scratch(wide, len(output.inputs))
    return nested + wide.element.itemsize * (entries * len(reads) + min(spec.numel, BLOCK) * (2 * len(reads) + 2))
