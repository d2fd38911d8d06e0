"""Experts and their merges as checkpoints, computed while they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View, hash_text, is_integer, select_rows
from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.recent import Recent
from merganser.errors import CheckpointError, InputError
from merganser.kernels.spectra import Factors, top_svd
from merganser.lazy import torch
from merganser.library.changes import task_matrix
from merganser.library.expert_file import ExpertFile
from merganser.library.unfolding import as_matrix, is_matrix
from merganser.methods.matrices import FLOOR, matrix_shape, rank_kept
from merganser.methods.tsv import TSV, orthogonal_sum

if TYPE_CHECKING:
    from torch import Tensor


class Expert(View):
    """θ₀ + u · diag(s) · vᵀ for matrices, θ₀ + the decoded change for coded tensors, the stored tensor if it was kept
    whole, and the base's tensor otherwise.

    Rebuilt tensors are read in float32 and rounded once, when written.
    """

    def __init__(self, base: Checkpoint, file: ExpertFile, name: str) -> None:
        super().__init__(base, f"{file.path.parent.parent}:{name}")
        self.name = name
        self.file = file
        for changed, kind in file.kinds.items():
            if kind != "full" and not (changed in base and file.fits(changed, base.spec(changed).shape)):
                stored = list(file.spec(changed).shape)
                raise CheckpointError(f"{file.path}: changes {changed!r} of shape {stored}, not in the base")

    def names(self) -> Sequence[str]:
        own = [name for name in self.file.kinds if name not in self.source]
        return [*self.source.names(), *own]

    def spec(self, name: str) -> TensorSpec:
        name = self.source.resolve_alias(name)
        return self.file.spec(name) if self.file.kinds.get(name) == "full" else self.source.spec(name)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        name = self.source.resolve_alias(name)
        kind = self.file.kinds.get(name)
        if kind == "full":
            return self.file.full(name, rows)
        tensor = self.source.read(name, rows)
        return tensor if kind is None else self.file.added_to(tensor, name, rows)

    def overhead(self, name: str, entries: int) -> int:
        coded = self.file.kinds.get(name) == "coded"
        return super().overhead(name, entries) + (4 * self.source.spec(name).numel if coded else 0)

    def fingerprint(self) -> str:
        shared = f" {self.file.shared.weights.fingerprint()}" if self.file.shared else ""
        parts = f"{self.source.fingerprint()} {self.file.weights.fingerprint()}{shared}"
        return hash_text(parts)

    def files(self) -> Sequence[Path]:
        shared = self.file.shared.weights.files() if self.file.shared else ()
        return [*self.source.files(), *self.file.weights.files(), *shared]

    def lineage(self) -> Lineage:
        kind = "compressed expert" if "coded" in self.file.kinds.values() else "low-rank expert"
        return Lineage(self.source.label, (self.label,), (kind,))

    def factors(self, name: str, k: int | None = None) -> Factors | None:
        """Return the task matrix of a tensor as float64 factors, decomposed unless stored as such; None if
        unchanged.
        """
        if name not in self:
            raise self.missing(name)
        name = self.source.resolve_alias(name)
        kind = self.file.kinds.get(name)
        if kind is None:
            return None
        shape = self.spec(name).shape
        if not self.merges(name) or not (len(shape) == 2 or kind == "factors" or is_matrix(shape)):
            raise InputError(f"{self.label}: {name!r}, {self.spec(name)}, is not a changed matrix of the base")
        if kind == "factors":
            found = self.file.factors(name)
            return found if k is None else found.truncate(k)
        delta = as_matrix(self.delta(name))
        return top_svd(delta, k or min(delta.shape)).above(FLOOR)

    def delta(self, name: str) -> Tensor:
        """Return θ_t − θ₀ in float32, in the tensor's own shape; in float64 if the tensor is and was kept whole."""
        if self.file.kinds.get(name) in ("factors", "coded"):
            return self.file.change(name).view(self.source.spec(name).shape)
        return task_matrix(self.source, self, name)

    def merges(self, name: str) -> bool:
        """Return whether the tensor takes part in merges: a float tensor of the base's shape."""
        return (
            name in self.source
            and not is_integer(self.source.spec(name).dtype)
            and self.spec(name).shape == self.source.spec(name).shape
        )


class MergedExperts(View):
    """TSV-Merge of experts from their stored factors, without decomposing matrices that are stored as factors."""

    def __init__(self, base: Checkpoint, experts: Sequence[Expert], rule: TSV) -> None:
        super().__init__(base, f"merge of {', '.join(expert.name for expert in experts)}")
        self.experts = experts
        self.rule = rule
        self._weights = dict(zip((expert.name for expert in experts), rule.weight, strict=True))
        # Several threads read blocks of rows, so the last few matrices are cached.
        self._recent: Recent[Tensor] = Recent(3)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        name = self.source.resolve_alias(name)
        base = self.source.read(name, rows)
        if not self.changing(name):
            return base
        delta = select_rows(self._recent.get(name, lambda: self._compute(name)), rows)
        return torch.add(base.to(delta.dtype), delta, alpha=self.rule.scale)

    def changing(self, name: str) -> list[Expert]:
        """Return the experts that change a tensor; one of weight 0 takes no part, as in the method `tsv`."""
        return [e for e in self.experts if self._weights[e.name] and name in e.file.kinds and e.merges(name)]

    def is_factored(self, name: str) -> bool:
        """Return whether the tensor is merged as a matrix; convolution kernels are, unless the rule excludes them."""
        shape = self.source.spec(name).shape
        return is_matrix(shape) and self.rule.applies(name, shape)

    def rank_of(self, name: str) -> int:
        """Return the maximum number of components per expert for a matrix, or for a kernel as one."""
        n = min(matrix_shape(self.source.spec(name).shape))
        return rank_kept(n, len(self.experts), self.rule.rank_fraction) if self.rule.low_rank else n

    def factors(self, name: str) -> list[Factors]:
        """Return the truncated factors of the experts that change a matrix, with singular values times the weights."""
        parts = []
        for expert in self.changing(name):
            found = expert.factors(name, self.rank_of(name))
            assert found is not None, "only experts that changed the tensor are asked"
            parts.append(found._replace(s=found.s * self._weights[expert.name]))
        return parts

    def _compute(self, name: str) -> Tensor:
        spec = self.source.spec(name)
        shape, wide = spec.shape, torch.float64 if spec.dtype == torch.float64 else torch.float32
        if not self.is_factored(name):
            total = torch.zeros(shape, dtype=torch.float64)
            for expert in self.changing(name):
                total.add_(expert.delta(name), alpha=self._weights[expert.name])
            return (total / len(self.experts)).to(wide)
        merged = orthogonal_sum(self.factors(name), self.rule.orthogonalize, self.rule.tolerance, wide)
        return merged.view(shape)

    def fingerprint(self) -> str:
        parts: Mapping[str, str] = {expert.name: expert.fingerprint() for expert in self.experts}
        return hash_text(f"{self.rule} {parts}")

    def files(self) -> Sequence[Path]:
        return [path for expert in self.experts for path in expert.files()]

    def lineage(self) -> Lineage:
        names = [expert.name for expert in self.experts]
        return Lineage(self.source.label, tuple(names), (self.rule.name,))
