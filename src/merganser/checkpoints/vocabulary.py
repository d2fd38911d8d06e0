"""A checkpoint converted to another vocabulary: rows of its embeddings and heads are gathered and filled in.

A `VocabularyMap` describes the rows as data for a plan; `Remapped` is the view.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View, hash_text
from merganser.checkpoints.recent import Recent
from merganser.checkpoints.row_fits import HELD, fit_sparse, mean_row
from merganser.checkpoints.row_runs import RowRun, Terms, gather
from merganser.kernels.pursuit import BATCH
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

_MEAN_ROWS = 4096


@dataclass(frozen=True)
class RowFit:
    """How rows of absent tokens are computed: as combinations of the model's rows, fitted in another embedding.

    A token's row in the `donor` is fitted with the donor's rows of shared tokens, and the same combination of the
    model's own rows is used. `omp` combines `terms` rows by orthogonal matching pursuit (arXiv:2506.06607), around the
    mean and scaled by the quality of the fit (see `row_fits`); `nearest` takes the row with the most similar direction.

    Attributes:
        rule: "omp" or "nearest".
        donor: The model of the plan that provides the output's vocabulary.
        terms: The number of rows to combine.
        tensors: The donor's tensor for each of the model's.
    """

    rule: str
    donor: int
    terms: int
    tensors: Mapping[str, str]


@dataclass(frozen=True)
class VocabularyMap:
    """The sources of the rows of a model's vocabulary tensors.

    Attributes:
        tensors: The names of the same tensor in every model of the plan, by its name in this model.
        runs: The rows of the output, in order.
        fit: How absent rows are fitted, if at all.
    """

    tensors: Mapping[str, tuple[str, ...]]
    runs: tuple[RowRun, ...]
    fit: RowFit | None = None


@dataclass(frozen=True)
class _Fitted:
    """The composition of fitted rows: terms of the model's rows, and a share of the mean of its shared rows."""

    terms: Terms
    shares: np.ndarray | None = None
    mean: Tensor | None = None


class Remapped(View):
    """`source` with its vocabulary tensors rebuilt by a map; `models` are the plan's, without maps."""

    def __init__(self, source: Checkpoint, remap: VocabularyMap, models: Sequence[Checkpoint]) -> None:
        super().__init__(source, source.label)
        self._models = models
        self._tensors = remap.tensors
        self._fit = remap.fit
        self._terms = Terms.of(remap.runs)
        starts = np.cumsum([0, *(run.count for run in remap.runs)])
        self._rows = int(starts[-1])
        self._mean_rows, self._fit_rows = (
            _list_rows(starts, [i for i, run in enumerate(remap.runs) if run.sources == kind]) for kind in (None, "fit")
        )
        self._identity = hash_text(repr(remap))
        self._means: Recent[Tensor] = Recent()
        self._fitted: Recent[_Fitted] = Recent()

    def spec(self, name: str) -> TensorSpec:
        spec = self.source.spec(name)
        if self._stored(name) is None:
            return spec
        return TensorSpec((self._rows, *spec.shape[1:]), spec.dtype)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        stored = self._stored(name)
        if stored is None:
            return self.source.read(name, rows)
        first, last = rows or (0, self._rows)
        last = max(first, min(last, self._rows))
        spec = self.source.spec(stored)
        made = torch.zeros((last - first, *spec.shape[1:]), dtype=self._choose_dtype(stored), device="cpu")
        self._add(made, stored, self._terms.within(first, last), self._tensors[stored], self._models)
        missing = self._mean_rows
        if self._fit is not None and stored in self._fit.tensors and len(self._fit_rows):
            fitted = self._fitted.get(stored, lambda: self._find_fit(stored))
            self._add(made, stored, fitted.terms.within(first, last), (stored,), (self.source,))
            if fitted.shares is not None and fitted.mean is not None:
                here = (self._fit_rows >= first) & (self._fit_rows < last)
                shares = torch.from_numpy(fitted.shares[here]).to(made.dtype)
                made[torch.from_numpy(self._fit_rows[here] - first)] += torch.outer(shares, fitted.mean.to(made.dtype))
        else:
            missing = np.union1d(missing, self._fit_rows)
        alike = missing[(missing >= first) & (missing < last)] - first
        if len(alike):
            made[torch.from_numpy(alike)] = self._means.get(stored, lambda: self._average_rows(stored, spec))
        return made

    def fingerprint(self) -> str:
        parts = [self._identity, self.source.fingerprint(), *(model.fingerprint() for model in self._models)]
        return hash_text("\n".join(parts))

    def overhead(self, name: str, entries: int) -> int:
        """Return the source's overhead plus that of fitting: the donor's rows, also centred, the fit of a batch, and
        the model's rows that held-out rows are predicted from.
        """
        stored = self._stored(name)
        if stored is None or self._fit is None or stored not in self._fit.tensors:
            return super().overhead(name, entries)
        rows, width = self._models[self._fit.donor].spec(self._fit.tensors[stored]).shape
        predicted = 16 * HELD * (self._fit.terms + 1) * self.source.spec(stored).shape[1]
        fitted = 4 * (4 * rows * width + BATCH * (rows + self._fit.terms * width))
        return super().overhead(name, entries) + fitted + predicted

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        if self._stored(name) is None:
            self.source.prefetch(name, rows)

    def _stored(self, name: str) -> str | None:
        name = self.resolve_alias(name)
        return name if name in self._tensors else None

    def _choose_dtype(self, name: str) -> torch.dtype:
        """Return one dtype for all rows of a tensor, with unrounded means: float32, or float64 if a model has it."""
        used = np.unique(self._terms.models)
        dtypes = [self._models[i].spec(self._tensors[name][i]).dtype for i in used]
        return functools.reduce(torch.promote_types, [self.source.spec(name).dtype, *dtypes], torch.float32)

    def _add(self, made: Tensor, name: str, terms: Terms, names: Sequence[str], models: Sequence[Checkpoint]) -> None:
        """Add the terms to rows of `made`; a row that is only copied stays exact."""
        for model in np.unique(terms.models):
            mine = terms.models == model
            for start in range(0, int(mine.sum()), _MEAN_ROWS):
                part = slice(start, start + _MEAN_ROWS)
                rows, taken, weights = (column[mine][part] for column in (terms.rows, terms.taken, terms.weights))
                found = gather(models[model], names[model], taken).to(made.dtype)
                at = torch.from_numpy(rows)
                alone = torch.from_numpy(weights == 1)
                made[at[alone]] = found[alone]
                scale = torch.from_numpy(weights).to(made.dtype).view(-1, *[1] * (made.dim() - 1))
                made.index_add_(0, at[~alone], found[~alone] * scale[~alone])

    def _find_fit(self, name: str) -> _Fitted:
        """Return the composition of fitted rows."""
        assert self._fit is not None
        donor, tensor, shared = self._models[self._fit.donor], self._fit.tensors[name], self._find_shared()
        atoms = gather(donor, tensor, self._terms.rows[shared]).float()
        targets = gather(donor, tensor, self._fit_rows).float()
        own = self._terms.taken[shared]

        def read(places: np.ndarray) -> Tensor:
            return gather(self.source, name, own[places])

        shares = mean = None
        if self._fit.rule == "nearest":
            directions = torch.nn.functional.normalize(atoms, dim=1)
            starts = range(0, len(targets), BATCH)
            best = [(targets[i : i + BATCH] @ directions.T).argmax(1, keepdim=True) for i in starts]
            indices = torch.cat(best)
            weights = torch.ones(indices.shape)
        else:
            indices, weights, rest = fit_sparse(targets, atoms, read, self._fit.terms)
            shares, mean = rest.double().numpy(), mean_row(read, len(own))
        taken = own[indices.numpy()]
        rows = np.repeat(self._fit_rows, taken.shape[1])
        terms = Terms(rows, np.zeros_like(rows), taken.reshape(-1), weights.double().numpy().reshape(-1))
        return _Fitted(terms, shares, mean)

    def _find_shared(self) -> np.ndarray:
        """Return which terms are rows of the model that match a row of the donor."""
        assert self._fit is not None
        own = np.array([model is self.source for model in self._models])
        rows = min(self._models[self._fit.donor].spec(tensor).shape[0] for tensor in self._fit.tensors.values())
        shared: np.ndarray = (self._terms.weights == 1) & own[self._terms.models] & (self._terms.rows < rows)
        return shared

    def _average_rows(self, name: str, spec: TensorSpec) -> Tensor:
        total = torch.zeros(spec.shape[1:], dtype=torch.float64, device="cpu")
        for start in range(0, spec.shape[0], _MEAN_ROWS):
            stop = min(start + _MEAN_ROWS, spec.shape[0])
            total += self.source.read(name, (start, stop)).to(torch.float64).sum(0)
        return (total / max(1, spec.shape[0])).to(self._choose_dtype(name))


def _list_rows(starts: np.ndarray, runs: Sequence[int]) -> np.ndarray:
    """Return the row numbers of some runs."""
    parts = [np.arange(starts[i], starts[i + 1]) for i in runs]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
