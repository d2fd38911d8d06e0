"""Rows of a tensor that are combined from rows of others: runs as data, terms as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from merganser.checkpoints.base import Checkpoint
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

#: Rows that are closer to each other than this are read together.
_GAP = 256


@dataclass(frozen=True)
class RowRun:
    """`count` consecutive rows: row k is the mean of the rows `row + k` of its sources (model, row).

    Without any source the rows are zero. None instead of sources means the mean row of the model, and "fit" the result
    of the map's `Fit`. `weights`, which sum to 1, make the mean a weighted one.
    """

    count: int
    sources: tuple[tuple[int, int], ...] | Literal["fit"] | None
    weights: tuple[float, ...] = ()


def join_rows(rows: Iterable[RowRun]) -> tuple[RowRun, ...]:
    """Join single rows that come from consecutive rows into runs."""
    found: list[RowRun] = []
    for row in rows:
        if found and _continues_run(found[-1], row):
            found[-1] = RowRun(found[-1].count + 1, found[-1].sources)
        else:
            found.append(row)
    return tuple(found)


def _continues_run(run: RowRun, row: RowRun) -> bool:
    """Return whether a row continues a run: it comes from the rows after the run's sources."""
    if run.weights or row.weights or not isinstance(run.sources, tuple) or not isinstance(row.sources, tuple):
        return run.sources == row.sources and not run.weights and not row.weights
    return len(run.sources) == len(row.sources) and all(
        model == m and first + run.count == r for (model, first), (m, r) in zip(run.sources, row.sources, strict=True)
    )


@dataclass(frozen=True)
class Terms:
    """Rows as sums: row `rows[i]` gets `weights[i]` times the row `taken[i]` of the model `models[i]`."""

    rows: np.ndarray
    models: np.ndarray
    taken: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[RowRun]) -> Terms:
        """Return the terms of the rows that runs take from models."""
        parts = []
        start = 0
        for run in runs:
            if run.sources is not None and run.sources != "fit":
                shares = run.weights or (1 / max(1, len(run.sources)),) * len(run.sources)
                for (model, row), weight in zip(run.sources, shares, strict=True):
                    parts.append((start, run.count, model, row, weight))
            start += run.count
        counts = np.array([count for _, count, *_ in parts], dtype=np.int64)
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts, _, models, taken, weights = (np.repeat(column, counts) for column in _columns(parts))
        order = np.argsort(starts + steps, kind="stable")
        return cls((starts + steps)[order], models[order], (taken + steps)[order], weights[order])

    def within(self, first: int, last: int) -> Terms:
        """Return the terms of the rows from `first` to `last`, renumbered from 0."""
        start, stop = np.searchsorted(self.rows, (first, last))
        part = slice(start, stop)
        return Terms(self.rows[part] - first, self.models[part], self.taken[part], self.weights[part])


def _columns(parts: Sequence[tuple[int, int, int, int, float]]) -> list[np.ndarray]:
    kinds = (np.int64, np.int64, np.int64, np.int64, np.float64)
    return [np.array([part[i] for part in parts], dtype=kind) for i, kind in enumerate(kinds)]


def gather(checkpoint: Checkpoint, name: str, rows: np.ndarray) -> Tensor:
    """Read rows of a tensor by index, in any order and with repetitions; close ones are read together."""
    wanted, places = np.unique(rows, return_inverse=True)
    cuts = np.flatnonzero(np.diff(wanted) > _GAP) + 1
    parts = []
    for group in np.split(wanted, cuts):
        if len(group):
            block = checkpoint.read(name, (int(group[0]), int(group[-1]) + 1))
            parts.append(block[torch.from_numpy(group - group[0])])
    if not parts:
        spec = checkpoint.spec(name)
        return torch.empty((0, *spec.shape[1:]), dtype=spec.dtype)
    return torch.cat(parts)[torch.from_numpy(places)]
