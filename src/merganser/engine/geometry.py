"""Inner products and sign counts of checkpoints too large for memory, streamed block by block.

Blocks are a function of the shapes alone, their sums are taken in float64 by one thread each, and the sums of blocks
are added without rounding (`math.fsum`): results do not depend on memory, threads or the order of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from merganser.checkpoints.base import Checkpoint
from merganser.engine.blocks import bounds, spans, take

Blocks = Iterator[tuple[NDArray[np.float64], ...]]


def blocks(vectors: Sequence[Checkpoint], name: str) -> Blocks:
    """The blocks of one tensor in float64, flat, of every vector at once; zeros from a vector without it."""
    spec = next(vector for vector in vectors if name in vector).spec(name)
    for span in spans(spec.shape):
        first, last = bounds(span)
        rows = (first, last) if spec.shape else None
        read = [vector.read(name, rows) if name in vector else None for vector in vectors]
        for block in span:
            yield tuple(
                np.zeros(block.numel) if tensor is None else take(tensor, block, first).double().numpy().reshape(-1)
                for tensor in read
            )


def inner_products(vectors: Sequence[Checkpoint]) -> NDArray[np.float64]:
    """G_ij = ⟨v_i, v_j⟩ over the tensors of all of them."""
    partial: dict[tuple[int, int], list[float]] = {}
    for name in dict.fromkeys(name for vector in vectors for name in vector.names()):
        for parts in blocks(vectors, name):
            for i, a in enumerate(parts):
                for j, b in enumerate(parts[: i + 1]):
                    # Not a BLAS dot: its order of summation depends on the threads at hand.
                    partial.setdefault((i, j), []).append(float(np.add.reduce(a * b)))
    gram = np.zeros((len(vectors), len(vectors)))
    for (i, j), values in partial.items():
        gram[i, j] = gram[j, i] = math.fsum(values)
    return gram


def norms(vector: Checkpoint) -> dict[str, float]:
    """The Frobenius norm of every tensor."""
    return {
        name: math.sqrt(math.fsum(float(np.add.reduce(a * a)) for (a,) in blocks([vector], name)))
        for name in vector.names()
    }


def sign_agreement(a: Checkpoint, b: Checkpoint) -> float:
    """The share of equal signs among the entries at which both vectors move; NaN if there is none."""
    agree = both = 0
    for name in (name for name in a.names() if name in b):
        for x, y in blocks([a, b], name):
            product = np.sign(x) * np.sign(y)
            agree += int(np.count_nonzero(product > 0))
            both += int(np.count_nonzero(product))
    return agree / both if both else math.nan
