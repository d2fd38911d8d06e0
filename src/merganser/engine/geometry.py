"""Inner products and sign counts of checkpoints too large for memory, streamed block by block.

Blocks depend on the shapes alone, each block is summed in float64 by one thread, and the sums are added without
rounding (`math.fsum`): results do not depend on memory, threads or the order of the tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from merganser.checkpoints.base import Checkpoint
from merganser.engine.blocks import Piece, bounds, spans, take
from merganser.engine.execute import one_torch_thread

T = TypeVar("T")
Entries: TypeAlias = NDArray[np.float64]
Parts: TypeAlias = tuple[Entries, ...]


def over_blocks(
    vectors: Sequence[Checkpoint], names: Sequence[str], function: Callable[[Parts], T]
) -> Iterator[tuple[str, T]]:
    """Apply `function` to the same block of every vector, flat and in float64, with the tensor's name.

    Results are in order and computed by all cores. A vector without a tensor counts as zeros.
    """

    def run(task: tuple[str, list[Piece]]) -> list[T]:
        name, span = task
        first, last = bounds(span)
        shape = shapes[name]
        read = [vector.read(name, (first, last) if shape else None) if name in vector else None for vector in vectors]
        return [
            function(
                tuple(
                    np.zeros(block.numel) if tensor is None else _entries(take(tensor, block, first)) for tensor in read
                )
            )
            for block in span
        ]

    shapes = {name: next(v for v in vectors if name in v).spec(name).shape for name in names}
    tasks = [(name, span) for name in names for span in spans(shapes[name])]
    with one_torch_thread(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for (name, _), results in zip(tasks, pool.map(run, tasks), strict=True):
            for result in results:
                yield name, result


def inner_products(vectors: Sequence[Checkpoint]) -> Entries:
    """Return G_ij = ⟨v_i, v_j⟩ over all tensors of the vectors."""
    names = list(dict.fromkeys(name for vector in vectors for name in vector.names()))
    return pair_sums(vectors, names, lambda a, b: a * b)


def pair_sums(
    vectors: Sequence[Checkpoint],
    names: Sequence[str],
    entry: Callable[[Entries, Entries], Entries],
    base: Checkpoint | None = None,
) -> Entries:
    """Return Σ entry(v_i − base, v_j − base) over the named tensors, symmetric in i and j (base 0 if none).

    NaN and infinity in vectors are propagated.
    """
    pairs = [(i, j) for i in range(len(vectors)) for j in range(i + 1)]

    def sums(parts: Parts) -> list[float]:
        with np.errstate(all="ignore"):
            moved = parts if base is None else [part - parts[-1] for part in parts[:-1]]
            # Not a BLAS dot product, whose order of summation depends on the threads.
            return [float(np.add.reduce(entry(moved[i], moved[j]))) for i, j in pairs]

    read = vectors if base is None else [*vectors, base]
    blocks = [values for _, values in over_blocks(read, names, sums)]
    total = np.zeros((len(vectors), len(vectors)))
    for position, (i, j) in enumerate(pairs):
        total[i, j] = total[j, i] = _total([values[position] for values in blocks])
    return total


def cosines(gram: Entries) -> Entries:
    """Return cos(v_i, v_j) from inner products; 0 if a vector is zero, NaN if one is not finite."""
    norms = np.sqrt(np.diag(gram))
    with np.errstate(invalid="ignore"):
        scale = np.outer(norms, norms)
    finite = np.isfinite(scale) & np.isfinite(gram)
    ratio: Entries = np.divide(gram, scale, out=np.where(finite, 0.0, np.nan), where=finite & (scale > 0))
    return ratio.clip(-1.0, 1.0)


def norms(vector: Checkpoint) -> dict[str, float]:
    """Return the Frobenius norm of every tensor."""
    squares: dict[str, list[float]] = {name: [] for name in vector.names()}
    for name, value in over_blocks([vector], vector.names(), lambda parts: float(np.add.reduce(parts[0] * parts[0]))):
        squares[name].append(value)
    return {name: math.sqrt(math.fsum(values)) for name, values in squares.items()}


def sign_agreement(a: Checkpoint, b: Checkpoint) -> float:
    """Return the share of equal signs among entries where both vectors are nonzero; NaN if there are none."""

    def counts(parts: Parts) -> tuple[int, int]:
        product = np.sign(parts[0]) * np.sign(parts[1])
        return int(np.count_nonzero(product > 0)), int(np.count_nonzero(product))

    found = [value for _, value in over_blocks([a, b], [name for name in a.names() if name in b], counts)]
    both = sum(moving for _, moving in found)
    return sum(equal for equal, _ in found) / both if both else math.nan


def _entries(tensor: Tensor) -> Entries:
    """Convert to float64 on the CPU, since not every device has float64."""
    return tensor.cpu().double().numpy().reshape(-1)


def _total(values: Sequence[float]) -> float:
    """Return the exact sum, rounded once; infinities of both signs give NaN."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
