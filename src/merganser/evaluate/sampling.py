"""Orders of items: samples whose every prefix is stratified, and batches of similar length."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np

#: Padding that a sequence may always have in a batch, and that a whole batch may have: a pass of its own for few
#: sequences costs more.
SLACK, BATCH_SLACK = 8, 64


def order_items(examiner: Sized, seed: int | Sequence[int] = 0) -> list[int]:
    """Return the items of a task in an order in which every prefix is a sample, stratified by label.

    The j-th of the m items of a label, in random order, comes at (j + u)/m with one random u per label: any share of
    the order contains about that share of every label.

    Args:
        examiner: The task. Its records' `label`, `letter` or `answer` (if it is an index) are the strata.
        seed: The seed of the order, which is the same for every model.

    Returns:
        All item numbers.

    Example:
        >>> from merganser.evaluate.examiners import Function
        >>> sorted(order_items(Function("module:function", 3)))
        [0, 1, 2]
    """
    records = getattr(examiner, "records", None)
    return order_by_strata([None] * len(examiner) if records is None else list(map(_stratum, records)), seed)


def order_by_strata(labels: Sequence[Hashable], seed: int | Sequence[int] = 0) -> list[int]:
    """Return the positions of labels in a random order in which every prefix has about each label's share."""
    strata: dict[Hashable, list[int]] = {}
    for item, label in enumerate(labels):
        strata.setdefault(label, []).append(item)
    generator = np.random.default_rng(seed)
    places: list[tuple[float, int]] = []
    for members in strata.values():
        start = generator.random()
        places += [((j + start) / len(members), int(i)) for j, i in enumerate(generator.permutation(members))]
    return [item for _, item in sorted(places)]


def _stratum(record: Mapping[str, Any]) -> Any:
    answer = record.get("answer")
    return record.get("label", record.get("letter", answer if isinstance(answer, int) else None))


def batches_by_length(lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
    """Yield the positions of sequences in batches of similar length, the longest first, to limit padding.

    Args:
        lengths: The length of each sequence.
        batch: Maximum sequences per batch.

    Yields:
        Positions, each once. A sequence is at most a quarter padding, unless the whole batch has little of it.

    Example:
        >>> list(batches_by_length([3, 90, 4, 80], 16))
        [[1, 3], [2, 0]]
    """
    batches: list[list[int]] = []
    longest = padded = 0
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        padding = longest - lengths[position]
        wasteful = padding > max(SLACK, longest // 4) and padded + padding > BATCH_SLACK
        if not batches or len(batches[-1]) == batch or wasteful:
            batches.append([])
            longest, padded, padding = lengths[position], 0, 0
        padded += padding
        batches[-1].append(position)
    yield from batches
