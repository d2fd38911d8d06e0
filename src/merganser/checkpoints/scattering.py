"""Convert assembled tensors back to the stored tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from merganser.checkpoints.lazy_tensors import (
    JoinedTensors,
    LazyTensor,
    PickedTensor,
    ReshapedTensor,
    SlicedTensor,
    StackedTensors,
    StoredTensor,
    TransposedTensor,
    cut,
    join,
    pick,
    reshape,
    stack,
    transpose,
)

#: Slices of one tensor that others must complete: its identity, whether they keep the axis, and the axis.
_Pieces = dict[tuple[int, bool, int], list[tuple[LazyTensor, int, LazyTensor]]]


def scatter(assembled: Mapping[str, LazyTensor], given: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the stored tensors for which the assembled tensors equal the given ones.

    Args:
        assembled: Tensors made from stored ones, by name.
        given: The wanted value of each, by the same names; others are ignored.

    Returns:
        Stored names -> tensors. Stored tensors that `given` determines only in part are left out.

    Raises:
        ValueError: If a given tensor has another shape than the assembled one where that matters.

    Example:
        >>> import torch
        >>> from merganser.checkpoints.memory import StateDict
        >>> stored = StateDict({"a": torch.zeros(1), "b": torch.zeros(2)})
        >>> both = join([StoredTensor(stored, "a"), StoredTensor(stored, "b")])
        >>> new = StoredTensor(StateDict({"ab": torch.arange(3)}), "ab")
        >>> scatter({"ab": both}, {"ab": new})["b"].read()
        tensor([1, 2])
    """
    found: dict[str, LazyTensor] = {}
    pieces: _Pieces = defaultdict(list)
    pending = [(assembled[name], tensor) for name, tensor in given.items() if name in assembled]
    while pending:
        for target, value in pending:
            _descend(target, value, found, pieces)
        pending = []
        for (_, sliced, axis), group in pieces.items():
            source = group[0][0]
            ordered = [value for _, _, value in sorted(group, key=lambda piece: piece[1])]
            covered = sum(value.shape[axis] for value in ordered) if sliced else len(ordered)
            if covered == source.shape[axis]:
                pending.append((source, join(ordered, axis) if sliced else stack(ordered, axis)))
        pieces.clear()
    return found


def _descend(target: LazyTensor, value: LazyTensor, found: dict[str, LazyTensor], pieces: _Pieces) -> None:
    """Follow an assembly down to stored tensors, or to slices that others must complete."""
    if isinstance(target, StoredTensor):
        found[target.name] = value
        return
    if target.shape != value.shape:
        raise ValueError(f"a tensor of shape {list(value.shape)} is given where {list(target.shape)} is assembled")
    if isinstance(target, StackedTensors):
        for index, part in enumerate(target.tensors):
            _descend(part, pick(value, target.axis, index), found, pieces)
    elif isinstance(target, JoinedTensors):
        start = 0
        for part in target.tensors:
            stop = start + part.shape[target.axis]
            _descend(part, cut(value, target.axis, start, stop), found, pieces)
            start = stop
    elif isinstance(target, TransposedTensor):
        _descend(target.source, transpose(value, *target.axes), found, pieces)
    elif isinstance(target, ReshapedTensor):
        _descend(target.source, reshape(value, target.source.shape), found, pieces)
    elif isinstance(target, SlicedTensor):
        pieces[id(target.source), True, target.axis].append((target.source, target.start, value))
    elif isinstance(target, PickedTensor):
        pieces[id(target.source), False, target.axis].append((target.source, target.index, value))
