"""Estimate the memory of a merge before it begins."""

from __future__ import annotations

from merganser.checkpoints.base import TensorSpec
from merganser.engine.blocks import BLOCK, SPAN
from merganser.engine.merge import Merge
from merganser.engine.plan import Output


def memory_bound(merge: Merge, workers: int, memory: int) -> int:
    """Return the most memory `execute` holds besides memory-mapped files: `memory`, unless a tensor needs more."""
    sizes = sorted((footprint(merge, output) for output in merge.plan.outputs), reverse=True)
    return max(sizes[0], min(memory, sum(sizes[:workers]))) if sizes else 0


def footprint(merge: Merge, output: Output, entries: int = SPAN) -> int:
    """Return the working memory in bytes that a task of an output may hold when it reads `entries` at once."""
    rule, spec = merge.rule(output), output.spec
    reads = [*output.reads, *sum(output.statistics.values(), ())]
    entries = spec.numel if rule.whole else min(spec.numel, entries)
    nested = sum(merge.sources[source.model].overhead(source.name, entries) for source in reads)
    if rule.copies:
        return nested + entries * spec.element.itemsize
    wide = TensorSpec(spec.shape, merge.arithmetic(output))
    if rule.whole:
        return nested + wide.nbytes * (len(reads) + 1) + rule.method.scratch(wide, len(output.inputs))
    return nested + wide.element.itemsize * (entries * len(reads) + min(spec.numel, BLOCK) * (2 * len(reads) + 2))
