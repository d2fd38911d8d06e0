"""Changes made by a merge: norms, distances, shares of the parents and sign conflicts of every tensor.

They are computed from the blocks while a tensor is merged. Tensors of 32,768 entries and more are sampled: one run of
1,024 entries in 32 of every fourth block, the same ones in every run of the merge. Tensors of fewer than 1,024 entries
are only listed.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.engine.blocks import Piece
from merganser.errors import CheckpointError
from merganser.kernels.spheres import gram, nonzero, total
from merganser.kernels.tiles import TILE
from merganser.lazy import np, torch
from merganser.strict_json import read_json

if TYPE_CHECKING:
    from torch import Tensor

FILE = "merganser-changes.json"
#: Share of blocks in the sample, and share of runs of 1,024 entries within each.
BLOCKS, RUNS = 4, 32
#: Smaller tensors are only listed: comparing ten thousand of them would cost more than merging them.
LEAST = 1 << 10


@dataclass(frozen=True)
class Change:
    """The change of one tensor.

    Attributes:
        method: The method that merged it; "copied" or "cast" where nothing was computed.
        entries: The number of its entries.
        parents: The merged models, as indices into the labels of `Changes`.
        looked_at: The number of entries in the sample.
        before: The norm of the base; without one, of the first parent.
        after: The norm of the result.
        to_base: The distance from the base to the result; None without a base.
        to_parents: The distance from each parent to the result.
        shares: c_t of the best fit Σ c_t (θ_t − θ_0) to the result's own difference from the base; without a base, of
            Σ c_t θ_t with Σ c_t = 1.
        conflicts: The share of entries that some parents raised and others lowered.
    """

    method: str
    entries: int
    parents: tuple[int, ...] = ()
    looked_at: int = 0
    before: float | None = None
    after: float | None = None
    to_base: float | None = None
    to_parents: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    conflicts: float | None = None

    def to_list(self) -> list[Any]:
        """Return the values in the order of the fields, as JSON values."""
        return [list(value) if isinstance(value, tuple) else value for value in asdict(self).values()]

    @classmethod
    def from_list(cls, values: Any) -> Change:
        """Return the change that `to_list` wrote.

        Raises:
            ValueError: If the values are not a change.
        """
        if not isinstance(values, list) or len(values) != 10:
            raise ValueError("a change has ten fields")
        method, entries, parents, looked_at, before, after, to_base, to_parents, shares, conflicts = values
        if not all(isinstance(each, list) for each in (parents, to_parents, shares)):
            raise ValueError("parents, distances and shares are lists")
        counts, numbers = (entries, looked_at, *parents), (before, after, to_base, conflicts, *to_parents, *shares)
        known = all(type(n) is int and n >= 0 for n in counts) and isinstance(method, str)
        if (
            not known
            or not all(n is None or type(n) in (int, float) for n in numbers)
            or None in (*to_parents, *shares)
        ):
            raise ValueError("a field has another type")
        if to_parents and not len(to_parents) == len(shares) == len(parents):
            raise ValueError("expected a distance and a share for each parent")
        return cls(
            *(method, entries, tuple(parents), looked_at, before, after, to_base),
            *(tuple(to_parents), tuple(shares), conflicts),
        )


def is_looked_at(spans: Sequence[Sequence[Piece]], block: Piece) -> bool:
    """Return whether a block of a tensor belongs to the sample."""
    first = spans[0][0]
    return block.offset % (BLOCKS * max(1, first.numel)) == 0


def compare(parents: Sequence[Tensor], base: Tensor | None, made: Tensor) -> list[float]:
    """Return sign conflicts, squared norms of reference and result, and the lower half of a Gram matrix.

    The Gram matrix is that of the differences of the parents and the result from the reference: the base, or else the
    first parent. The function may be recorded.
    """
    reference = parents[0] if base is None else base
    moves = [parent - reference for parent in (parents[1:] if base is None else parents)]
    clashes: Any = 0
    if len(moves) > 1:
        high, low = moves[0], moves[0]
        for move in moves[1:]:
            high, low = torch.maximum(high, move), torch.minimum(low, move)
        clashes = nonzero(high.sign().clamp(min=0).mul_(low.sign().clamp(max=0)))
    triangle = gram([*moves, made - reference])
    return [clashes, total(reference * reference), total(made * made), *itertools.chain.from_iterable(triangle)]


def compare_sample(parents: Sequence[Tensor], base: Tensor | None, made: Tensor) -> list[float]:
    """Return the number of sampled entries and their `compare`, computed by one matrix product."""
    rows = (
        torch.stack([_sample(t) for t in (*parents, *(() if base is None else (base,)), made)]).double().cpu().numpy()
    )
    reference = rows[0] if base is None else rows[-2]
    moves = np.concatenate([rows[1:-1] if base is None else rows[:-2], rows[-1:]]) - reference
    before = moves[:-1]
    clashes = np.count_nonzero((before.max(0) > 0) & (before.min(0) < 0)) if len(before) > 1 else 0
    products = moves @ moves.T
    halves = [float(products[i, j]) for i in range(len(moves)) for j in range(i + 1)]
    return [rows.shape[1], clashes, float(reference @ reference), float(rows[-1] @ rows[-1]), *halves]


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.numel() < RUNS * TILE:
        return flat
    whole = flat.numel() // TILE
    return flat[: whole * TILE].view(whole, TILE)[::RUNS].reshape(-1)


def conclude(
    method: str, entries: int, parents: tuple[int, ...], with_base: bool, parts: Sequence[Sequence[float]]
) -> Change:
    """Return the change of a tensor from the statistics of its blocks."""
    if not parts:
        return Change(method, entries, parents)
    looked_at, clashes, reference, made, *halves = (math.fsum(column) for column in zip(*parts, strict=True))
    size = math.isqrt(2 * len(halves))
    products = np.empty((size, size))
    for (row, column), value in zip(zip(*np.tril_indices(size), strict=True), halves, strict=True):
        products[row, column] = products[column, row] = value
    if not looked_at or not np.isfinite(products).all() or not math.isfinite(reference + made):
        return Change(method, entries, parents)
    scale = math.sqrt(entries / looked_at)
    inner, own = products[:-1, :-1], products[-1, -1]
    gaps = [math.sqrt(max(0.0, own - 2 * products[-1, t] + products[t, t])) for t in range(size - 1)]
    shares = np.linalg.lstsq(inner, products[-1, :-1], rcond=1e-9)[0].tolist() if size > 1 else []
    if not with_base:
        gaps, shares = [math.sqrt(own), *gaps], [1 - sum(shares), *shares]
    return Change(
        method,
        entries,
        parents,
        int(looked_at),
        _short(math.sqrt(reference) * scale),
        _short(math.sqrt(made) * scale),
        _short(math.sqrt(own) * scale) if with_base else None,
        tuple(_short(gap * scale) for gap in gaps),
        tuple(map(_short, shares)),
        _short(clashes / looked_at),
    )


def _short(value: float) -> float:
    """Round to six digits: more would be noise of the sample."""
    return float(f"{value:.6g}")


@dataclass(frozen=True)
class Changes:
    """The changes of a merge by tensor; `labels` are those of the models."""

    labels: tuple[str, ...]
    tensors: Mapping[str, Change]

    def to_bytes(self) -> bytes:
        tensors = {name: change.to_list() for name, change in self.tensors.items()}
        fields = list(Change.__dataclass_fields__)
        content = {"version": 1, "labels": list(self.labels), "fields": fields, "tensors": tensors}
        return (json.dumps(content, separators=(",", ":")) + "\n").encode()


def read_changes(directory: Path) -> Changes | None:
    """Read the changes that a merge recorded in its output.

    Args:
        directory: The output of a merge.

    Returns:
        The changes; None if none were recorded.

    Raises:
        CheckpointError: If the file is damaged.

    Example:
        >>> changes = read_changes(Path("merged"))  # doctest: +SKIP
        >>> changes.tensors["model.norm.weight"].to_base  # doctest: +SKIP
    """
    path = directory / FILE
    if not path.is_file():
        return None
    try:
        content = read_json(path, finite=True)
        if not isinstance(content, dict) or content.get("version") != 1 or not isinstance(content["tensors"], dict):
            raise ValueError("not a record of changes, or of another version")
        labels = content["labels"]
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise ValueError("labels are a list of texts")
        tensors = {name: Change.from_list(values) for name, values in content["tensors"].items()}
        if any(parent >= len(labels) for change in tensors.values() for parent in change.parents):
            raise ValueError("a parent without a label")
        return Changes(tuple(labels), tensors)
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: is damaged ({error}); delete it, or merge again") from None
