"""Handle parts of weights that the example inputs did not reach, and that other inputs may use.

A bare dim is *reached* if it is in an output of the module, or if some operation mixes it away (the inputs of a linear
layer, an axis that is summed). One that is never reached was cut off by slices: rows of a position table beyond the
length of the example, the corner of a causal mask, the scales of a task that was not selected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from merganser.align.tracing.dims import Dim, because, leaves, pin
from merganser.align.tracing.graph import Trace
from merganser.align.tracing.nesting import families
from merganser.align.tracing.unification import collapse


def pin_unreached(state: Iterable[Sequence[Dim]], trace: Trace) -> None:
    """Remove freedom that holds only for the example inputs.

    An axis of a weight that was cut, with a part left out, may be cut elsewhere by other inputs: it is pinned
    completely. If an index was selected and others were not, all indices are assumed to play the same role and share
    their units.
    """
    axes = [axis for tensor in state for axis in tensor]
    reached = _find_reached(trace)
    while partly := [family for axis in axes for family, _ in families(axis) if _is_partly_reached(family, reached)]:
        collapse(partly[0])
        reached = _find_reached(trace)
    with because("the example inputs, which leave out a part of it that others may use"):
        pin(*[axis for axis in axes if any(not leaf.pinned and leaf not in reached for leaf in leaves(axis))])


def _is_partly_reached(dim: Dim, reached: set[Dim]) -> bool:
    return len({leaf in reached for leaf in leaves(dim)}) == 2


def _find_reached(trace: Trace) -> set[Dim]:
    found = _leaves(dim for _, axes in trace.outputs for dim in axes)
    for operands, results in trace.consumed:
        found |= _leaves(dim for axes in operands for dim in axes) - _leaves(dim for axes in results for dim in axes)
    return found


def _leaves(dims: Iterable[Dim]) -> set[Dim]:
    return {leaf for dim in dims for leaf in leaves(dim)}
