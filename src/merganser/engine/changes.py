"""Changes made by a merge: norms, distances, shares of the parents and sign conflicts of every tensor.

They are computed from the blocks while a tensor is merged. Tensors of 32,768 entries and more are sampled: one run of
1,024 entries in 32 of every eighth block, the same ones in every run of the merge. Tensors of fewer than 1,024 entries
are only listed.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.engine.blocks import Piece
from merganser.errors import CheckpointError
from merganser.kernels.arrays import AnyArray
from merganser.kernels.spheres import gram, nonzero, total
from merganser.kernels.tiles import TILE, Results
from merganser.lazy import np, torch
from merganser.strict_json import read_json

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor


FILE = "merganser-changes.json"
#: Share of blocks in the sample, and share of runs of 1,024 entries within each.
BLOCKS, RUNS = 8, 32
#: Smaller tensors are only listed: comparing ten thousand of them would cost more than merging them.
LEAST = 1 << 10


@dataclass(frozen=True)
class Change:
    """The change of one tensor. Norms and distances of a sampled tensor are estimated from the sample.

    A merge stores only `sums`, since anything else would cost it time; the other figures are computed from them when
    they are asked for. The reference is the base, or else the first parent.

    Attributes:
        method: The method that merged it; "copied" or "cast" where nothing was computed.
        entries: The number of its entries.
        parents: The merged models, as indices into the labels of `Changes`.
        with_base: Whether the reference is the base.
        sums: The number of entries in the sample, the number of those with a sign conflict, ‖reference‖², ‖result‖²,
            and the lower half of the Gram matrix of the differences of the (other) parents and the result from the
            reference. Empty if nothing was measured.
    """

    method: str
    entries: int
    parents: tuple[int, ...] = ()
    with_base: bool = False
    sums: tuple[float, ...] = ()

    @property
    def looked_at(self) -> int:
        """The number of entries in the sample."""
        return int(self.sums[0]) if self.sums else 0

    @property
    def conflicts(self) -> float | None:
        """The share of entries that some parents raised and others lowered."""
        return self.sums[1] / self.sums[0] if self.sums else None

    @property
    def before(self) -> float | None:
        """The norm of the reference."""
        return self._scale * math.sqrt(self.sums[2]) if self.sums else None

    @property
    def after(self) -> float | None:
        """The norm of the result."""
        return self._scale * math.sqrt(self.sums[3]) if self.sums else None

    @property
    def to_base(self) -> float | None:
        """The distance from the base to the result; None without a base."""
        return self._scale * math.sqrt(self._products[-1, -1]) if self.sums and self.with_base else None

    @property
    def to_parents(self) -> tuple[float, ...]:
        """The distance from each parent to the result."""
        if not self.sums:
            return ()
        products, own = self._products, float(self._products[-1, -1])
        others = [own - 2 * products[-1, t] + products[t, t] for t in range(len(products) - 1)]
        squares = others if self.with_base else [own, *others]
        return tuple(self._scale * math.sqrt(max(0.0, float(square))) for square in squares)

    @property
    def shares(self) -> tuple[float, ...]:
        """c_t of the best fit Σ c_t (θ_t − θ_0) to the result's own difference from the base; without a base, of
        Σ c_t θ_t with Σ c_t = 1.
        """
        if not self.sums:
            return ()
        products = self._products
        known = len(products) > 1
        found = np.linalg.lstsq(products[:-1, :-1], products[-1, :-1], rcond=1e-9)[0].tolist() if known else []
        return tuple(found) if self.with_base else (1 - sum(found), *found)

    @property
    def _scale(self) -> float:
        return math.sqrt(self.entries / self.sums[0])

    @cached_property
    def _products(self) -> npt.NDArray[np.float64]:
        halves = self.sums[4:]
        size = math.isqrt(2 * len(halves))
        products: npt.NDArray[np.float64] = np.zeros((size, size))
        products[np.tril_indices(size)] = halves
        products += np.tril(products, -1).T
        return products

    def to_list(self) -> list[Any]:
        """Return the values in the order of the fields, as JSON values."""
        return [self.method, self.entries, list(self.parents), self.with_base, list(self.sums)]

    @classmethod
    def from_list(cls, values: Any) -> Change:
        """Return the change that `to_list` wrote.

        Raises:
            ValueError: If the values are not a change.
        """
        if not isinstance(values, list) or len(values) != 5:
            raise ValueError("a change has five fields")
        method, entries, parents, with_base, sums = values
        if not isinstance(method, str) or not isinstance(with_base, bool):
            raise ValueError("a field has another type")
        if not isinstance(parents, list) or not all(type(n) is int and n >= 0 for n in (entries, *parents)):
            raise ValueError("entries and parents are numbers")
        if not isinstance(sums, list) or not all(type(n) in (int, float) for n in sums):
            raise ValueError("sums are numbers")
        moves = len(parents) + with_base
        if sums and (len(sums) != 4 + moves * (moves + 1) // 2 or sums[0] <= 0 or min(sums[1:4]) < 0):
            raise ValueError("expected a product for every two differences")
        return cls(method, entries, tuple(parents), with_base, tuple(map(float, sums)))


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
        high, low = moves[:2]
        if len(moves) > 2:
            high, low = functools.reduce(torch.maximum, moves), functools.reduce(torch.minimum, moves)
        clashes = nonzero((high * low).clamp(max=0))
    norms = total(reference * reference), total(made * made)
    return [clashes, *norms, *itertools.chain.from_iterable(gram([*moves, made - reference]))]


def read_sums(results: Results) -> list[float]:
    """Return the number of entries that a recorded `compare` processed, and what it found.

    Equals `recording.fill_in` at less than half of its cost: `compare` computes its sums in the order in which it
    returns them.
    """
    clashes = int(results.counts[0, 0]) if len(results.counts) else 0
    return [results.size, clashes, *map(math.fsum, results.sums.tolist())]


def compare_sample(rows: Sequence[AnyArray], with_base: bool) -> list[float]:
    """Return the number of sampled entries and their `compare`, computed by one matrix product.

    Args:
        rows: The `sample` of the parents, of the base if there is one, and of the result.
        with_base: Whether there is a base.
    """
    numbers = np.stack(rows).astype(np.float64, copy=False)
    reference = numbers[-2] if with_base else numbers[0]
    moves = np.concatenate([numbers[:-2] if with_base else numbers[1:-1], numbers[-1:]]) - reference
    before = moves[:-1]
    clashes = int(np.count_nonzero((before.max(0) > 0) & (before.min(0) < 0))) if len(before) > 1 else 0
    products = moves @ moves.T
    halves = [float(products[i, j]) for i in range(len(moves)) for j in range(i + 1)]
    made = numbers[-1]
    return [made.size, clashes, float(reference @ reference), float(made @ made), *halves]


def sample(tensor: Tensor) -> AnyArray:
    """Return the entries of a block that are compared."""
    flat = tensor.detach().reshape(-1)
    if not is_small(flat.numel()):
        whole = flat.numel() // TILE
        flat = flat[: whole * TILE].view(whole, TILE)[::RUNS].reshape(-1)
    numbers: AnyArray = flat.double().cpu().numpy()
    return numbers


def is_small(numel: int) -> bool:
    """Return whether all entries of a block of this size are compared."""
    return numel < RUNS * TILE


def conclude(
    method: str, entries: int, parents: tuple[int, ...], with_base: bool, parts: Sequence[Sequence[float]]
) -> Change:
    """Return the change of a tensor from the statistics of its blocks."""
    sums = tuple(parts[0] if len(parts) == 1 else map(math.fsum, zip(*parts, strict=True)))
    measured = sums and sums[0] > 0 and math.isfinite(sum(sums))
    return Change(method, entries, parents, with_base, sums if measured else ())


@dataclass(frozen=True)
class Changes:
    """The changes of a merge by tensor; `labels` are those of the models."""

    labels: tuple[str, ...]
    tensors: Mapping[str, Change]

    def to_bytes(self) -> bytes:
        """Return the content of the file, with twelve digits of each sum."""
        tensors = {name: change.to_list() for name, change in self.tensors.items()}
        for *_, sums in tensors.values():
            sums[:] = [float(f"{value:.12g}") for value in sums]
        fields = list(Change.__dataclass_fields__)
        content = {"version": 2, "labels": list(self.labels), "fields": fields, "tensors": tensors}
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
        if not isinstance(content, dict) or content.get("version") != 2 or not isinstance(content["tensors"], dict):
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
