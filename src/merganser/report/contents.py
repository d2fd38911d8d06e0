"""The contents of a checkpoint: tensors, dtypes and sizes by block, tied names, fingerprint, non-finite values."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, TensorSpec, is_integer, row_blocks
from merganser.checkpoints.tensor_names import block_of, natural_order
from merganser.lazy import torch
from merganser.report.collapsing import collapse_table
from merganser.report.page import Page
from merganser.report.tables import Link, Table
from merganser.units import show_size

if TYPE_CHECKING:
    from merganser.analysis.similarity import WeightSimilarity

#: Number of tensors that are listed by default.
UNFOLDED = 24
#: Entries that are checked at once.
_BLOCK = 1 << 24


@dataclass(frozen=True)
class TensorEntry:
    """One tensor; `not_finite` counts its NaNs and infinities if they were checked."""

    name: str
    block: str
    shape: tuple[int, ...]
    dtype: str
    parameters: int
    nbytes: int
    not_finite: int | None = None


@dataclass(frozen=True)
class Contents:
    """The description of a checkpoint."""

    label: str
    tensors: tuple[TensorEntry, ...]
    fingerprint: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def dtypes(self) -> dict[str, int]:
        """Return parameters by dtype, the most frequent first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.dtype] += tensor.parameters
        return dict(counts.most_common())

    def to_dict(self) -> dict[str, Any]:
        totals = {"parameters": self.parameters, "nbytes": self.nbytes, "dtypes": self.dtypes}
        return {**asdict(self), "aliases": dict(self.aliases), **totals}


def contents(checkpoint: Checkpoint, *, check: bool = False) -> Contents:
    """Describe a checkpoint from its headers; `check` reads every weight to find values that are not finite."""
    entries = []
    for name in sorted(checkpoint.names(), key=natural_order):
        spec = checkpoint.spec(name)
        entries.append(
            TensorEntry(
                name=name,
                block=block_of(name),
                shape=spec.shape,
                dtype=spec.element.name,
                parameters=spec.numel,
                nbytes=spec.nbytes,
                not_finite=_count_not_finite(checkpoint, name, spec) if check else None,
            )
        )
    aliases, notes = dict(checkpoint.aliases()), tuple(checkpoint.notes())
    return Contents(checkpoint.label, tuple(entries), checkpoint.fingerprint(), aliases, notes)


def blocks_table(found: Contents) -> Table:
    """Return the size of every block; blocks that are alike share a row."""
    groups: dict[str, list[TensorEntry]] = {}
    for tensor in found.tensors:
        groups.setdefault(tensor.block, []).append(tensor)
    rows = [
        [
            block,
            len(group),
            sum(tensor.parameters for tensor in group),
            sum(tensor.nbytes for tensor in group) / 2**20,
            " ".join(sorted({tensor.dtype for tensor in group})),
        ]
        for block, group in groups.items()
    ]
    return collapse_table(Table(["block", "tensors", "parameters", "MiB", "dtype"], rows, "Blocks"))


def tensors_table(found: Contents) -> Table:
    checked = any(tensor.not_finite is not None for tensor in found.tensors)
    rows = [
        [
            tensor.name,
            "×".join(map(str, tensor.shape)) or "scalar",
            tensor.dtype,
            tensor.nbytes / 2**20,
            *([tensor.not_finite] if checked else []),
        ]
        for tensor in found.tensors
    ]
    columns = ["tensor", "shape", "dtype", "MiB", *(["not finite"] if checked else [])]
    return Table(columns, rows, "Tensors")


def distance_table(found: WeightSimilarity, caption: str = "Distances") -> Table:
    """Return the cosine and the distance of every pair of checkpoints."""
    pairs = itertools.combinations(range(len(found.names)), 2)
    rows = [[found.names[a], found.names[b], found.cosine[a][b], found.distance[a][b]] for a, b in pairs]
    return Table(["model", "other", "cosine", "distance"], rows, caption)


def facts(found: Contents) -> list[str]:
    """Return one line per fact: size, dtypes, ties, notes, fingerprint, and the result of the check."""
    dtypes = ", ".join(f"{dtype} {count / max(1, found.parameters):.0%}" for dtype, count in found.dtypes.items())
    lines = [
        f"{len(found.tensors)} tensors, {found.parameters:,} parameters, {show_size(found.nbytes)} ({dtypes})",
        *(f"{alias} is tied to {name}" for alias, name in found.aliases.items()),
        *found.notes,
        f"fingerprint {found.fingerprint[:16]}",
    ]
    if any(tensor.not_finite is not None for tensor in found.tensors):
        bad = [f"{tensor.name} ({tensor.not_finite})" for tensor in found.tensors if tensor.not_finite]
        lines.append(f"NOT FINITE: {', '.join(bad)}" if bad else "every value is finite")
    return lines


def fill(page: Page, described: Mapping[str, Contents]) -> None:
    """Add a part for each checkpoint by name, and an overview if there are several."""
    if len(described) == 1:
        for found in described.values():
            _describe(page, found)
        return
    rows = []
    for name, found in described.items():
        with page.part(name) as anchor:
            _describe(page, found)
        size = [len(found.tensors), f"{found.parameters:,}", found.nbytes / 2**20]
        rows.append([Link(name, anchor), *size, " ".join(found.dtypes)])
    page.overview(["name", "tensors", "parameters", "MiB", "dtype"], rows, f"{len(rows)} checkpoints")


def _describe(page: Page, found: Contents) -> None:
    page.items([found.label, *facts(found)])
    page.add(blocks_table(found))
    page.add(tensors_table(found), folded=len(found.tensors) > UNFOLDED)


def _count_not_finite(checkpoint: Checkpoint, name: str, spec: TensorSpec) -> int:
    if is_integer(spec.element) or not spec.numel:
        return 0
    # float8 does not support isfinite.
    blocks = (checkpoint.read(name, rows).float() for rows in row_blocks(spec, entries=_BLOCK))
    return sum(int((~torch.isfinite(block)).sum()) for block in blocks)


def shorten_blocks(names: Sequence[str]) -> list[str]:
    """Return names of layers without the words that all of them begin with (`layers.0`, `layers.1`: `0`, `1`)."""
    parts = [name.split(".") for name in names]
    columns = itertools.takewhile(lambda words: len({*words}) == 1, zip(*parts, strict=False))
    common = len(list(columns)) if len(parts) > 1 else 0
    return [".".join(part[common:]) or name for part, name in zip(parts, names, strict=True)]
