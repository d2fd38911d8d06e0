"""Which checkpoints of a folder belong together, and which of them the others were fine-tuned from."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, read_entries
from merganser.checkpoints.tensor_names import natural_order
from merganser.errors import CheckpointError, MerganserError
from merganser.lazy import np
from merganser.studio.discovery import Item
from merganser.studio.roots import Roots

if TYPE_CHECKING:
    import numpy.typing as npt

#: Checkpoints that are compared, matrices read from each, and entries read from each matrix.
MOST, MATRICES, ENTRIES = 12, 4, 4096


def find_family(roots: Roots, items: Sequence[Item]) -> dict[str, list[str] | str | None]:
    """Return the largest group of language models of one architecture and size, as `base` and fine-tuned `models`.

    The base is the model called so, or else the one with the smallest sum of distances to the others: fine-tunes are
    √2 times as far from each other as from their base. Two models cannot tell; the older one is taken. Results of
    merges lie between their parents and are left out, as are files that are cut short.

    Args:
        roots: The directories they are in.
        items: What was found there.

    Returns:
        Paths as the page shows them; `base` is None if there are no two such models.
    """
    groups: dict[tuple[object, object], list[Item]] = {}
    for item in items:
        left_out = item.facts.get("merged") or item.facts.get("damaged")
        if item.kind == "checkpoint" and item.facts.get("live") and not left_out:
            groups.setdefault((item.facts.get("architecture"), item.facts.get("parameters")), []).append(item)
    group = max(groups.values(), key=len, default=[])
    if len(group) < 2:
        return {"base": None, "models": [item.path for item in group]}
    called = [item for item in group if re.search("base", item.path, re.IGNORECASE)]
    base = min(called, key=lambda item: len(item.path)) if called else _find_nearest(roots, group[:MOST])
    family = [base, *(item for item in group if item is not base)][:MOST]
    others = [item.path for item in family if item is not base]
    return {"base": base.path, "models": sorted(others, key=natural_order)}


def _find_nearest(roots: Roots, family: Sequence[Item]) -> Item:
    """Return the item with the smallest sum of distances to the others; the oldest if that does not tell."""
    oldest = min(family, key=lambda item: item.modified)
    if len(family) == 2:
        return oldest
    try:
        samples = _sample(roots, [item.path for item in family])
    except MerganserError:  # one that cannot be read
        return oldest
    sums = [sum(float(np.linalg.norm(a - b)) for b in samples) for a in samples]
    return family[int(np.argmin(sums))] if all(map(math.isfinite, sums)) else oldest


def _sample(roots: Roots, paths: Sequence[str]) -> list[npt.NDArray[np.float32]]:
    """Read the first entries of the largest matrices that all checkpoints have."""
    opened = [roots.open(path) for path in paths]
    first = opened[0]
    shared = [n for n in first.names() if all(n in c and c.spec(n).shape == first.spec(n).shape for c in opened)]
    matrices = [name for name in shared if len(first.spec(name).shape) == 2]
    chosen = sorted(matrices, key=lambda name: -first.spec(name).numel)[:MATRICES]
    rows = {name: -(-ENTRIES // max(1, first.spec(name).shape[1])) for name in chosen}
    return [
        np.concatenate(
            [np.zeros(1, np.float32), *(_read_first_entries(c, n, min(rows[n], c.spec(n).shape[0])) for n in chosen)]
        )
        for c in opened
    ]


def _read_first_entries(checkpoint: Checkpoint, name: str, rows: int) -> npt.NDArray[np.float32]:
    """Read the first entries of a matrix, without importing torch where they are stored as they are."""
    entries = read_entries(checkpoint, name, (0, rows))
    if entries is None:
        raise CheckpointError(f"{checkpoint.label}: {name} cannot be read into memory")
    return entries.numbers()[:ENTRIES].astype(np.float32)
