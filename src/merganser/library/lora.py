"""Write task matrices as PEFT LoRA adapters, for servers without support for libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, is_integer
from merganser.checkpoints.dtypes import dtype_of
from merganser.checkpoints.layouts import as_modules
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.checkpoints.reads import noting_reads
from merganser.checkpoints.skeleton import build_skeleton
from merganser.engine.adapter_origin import AdapterOrigin
from merganser.engine.directories import paths_in
from merganser.engine.publishing import check_out
from merganser.errors import InputError
from merganser.kernels.leading import leading_svd
from merganser.kernels.spectra import Factors, spectrum
from merganser.library.adapter_modules import AdapterModules
from merganser.library.adapter_writing import (
    DTYPES,
    AdapterReport,
    Orientation,
    StoredUpdate,
    check_rank,
    group_by_module,
    module_of,
    save_adapter,
    share,
)
from merganser.library.changes import check_finite, check_fit, is_change, is_comparable, task_matrix
from merganser.library.ranks import RankPolicy
from merganser.library.unfolding import as_matrix, is_matrix
from merganser.library.views import Expert
from merganser.methods.adapters import balanced
from merganser.methods.matrices import matrix_shape

_DEFAULT_RANK = 64


def extract_lora(
    finetuned: Reference,
    base: Reference,
    out: str | os.PathLike[str],
    *,
    rank: int | None = None,
    energy: float | None = None,
    budget: int | str | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    whole: bool = True,
    dtype: str | torch.dtype = "bfloat16",
    fan_in_fan_out: bool | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> AdapterReport:
    """Extract the best adapter for the difference of two checkpoints, in PEFT's format.

    Linear layers, GPT-2's Conv1D, convolutions and embeddings get low-rank updates; norms, biases and the head of a
    classifier are saved whole. The report names other changes (fused experts, embeddings tied to the head), with the
    share of the energy that was kept.

    Args:
        finetuned: The fine-tuned checkpoint.
        base: The checkpoint it was fine-tuned from.
        out: Directory of the new adapter.
        rank: Maximum rank of every update; 64 if neither `energy` nor `budget` is given.
        energy: Instead of a rank: each matrix gets the smallest rank that keeps this share of its energy.
        budget: Instead of a rank: bytes, or a size such as "50MB", for all factors, allocated where they keep most
            energy.
        include: Patterns of parameters that may go into the adapter, such as "*.mlp.*".
        exclude: Patterns of parameters that may not.
        whole: Save norms and biases whole; use False for servers that only support low-rank updates.
        dtype: float32, bfloat16 or float16.
        fan_in_fan_out: Whether weights are stored input × output, as in GPT-2; by default decided by the model's class.
        overwrite: Replace `out`.
        on_progress: Called with the tensors done, those in all, and the name of the next.

    Returns:
        A report of the adapter's content, and of what was left out.

    Raises:
        InputError: If nothing that fits an adapter has changed, or `out` cannot be written.

    Example:
        >>> extract_lora("law", "base", "law-lora", rank=16)  # doctest: +SKIP
    """
    check_rank(rank)
    given = [name for name, value in (("rank", rank), ("energy", energy), ("budget", budget)) if value is not None]
    if len(given) > 1:
        raise InputError(f"choose one of {', '.join(given)}: each sets the ranks")
    policy = RankPolicy.choose(None, energy, budget, 1) if given and rank is None else None
    stored = dtype_of(dtype, DTYPES, "adapters")
    tuned, origin = open_checkpoint(finetuned), open_checkpoint(base)
    made_by: dict[str, Any] = {
        "function": "extract_lora",
        "rank": rank,
        "energy": energy,
        "budget": budget,
        "whole": whole,
    }
    made_by |= {"include": list(include), "exclude": list(exclude), "dtype": str(dtype)}
    sources = AdapterOrigin(made_by, [(tuned.label, tuned), (origin.label, origin)])
    inputs = [path for source in (finetuned, base, tuned.label, origin.label) for path in paths_in(source)]
    check_out(Path(out), overwrite, [*inputs, *tuned.files(), *origin.files()])
    model = build_skeleton(tuned) or build_skeleton(origin)
    if model is not None:
        tuned, origin = as_modules(tuned, model), as_modules(origin, model)
    check_fit(origin, tuned)
    modules = AdapterModules(origin, tuned, fan_in_fan_out, model)
    draft = _Draft(modules, origin, stored, whole, sources)
    with noting_reads(sources.reads):
        changed = list(_find_changed(tuned, origin, modules))
        wanted = [name for name in changed if _matches(name, include) and not _matches(name, exclude)]
        ranks = _choose_ranks(wanted, tuned, origin, draft, rank or _DEFAULT_RANK, policy)
        for number, name in enumerate(changed):
            on_progress(number, len(changed), name)
            draft.add(name, tuned, ranks.get(name, 0) if name in wanted else None)
    return draft.write(Path(out), tuned, overwrite, patterns=policy is not None)


def export_expert(
    expert: Expert,
    out: str | os.PathLike[str],
    *,
    rank: int | None = None,
    budget: int | str | None = None,
    whole: bool = True,
    dtype: str | torch.dtype = "bfloat16",
    fan_in_fan_out: bool | None = None,
    overwrite: bool = False,
) -> AdapterReport:
    """Write an expert of a library as an adapter, at its own rank (that of its largest matrix) or less.

    A matrix that is not stored as factors is decomposed, by default to rank 64 at most.

    Args:
        expert: The expert.
        out: Directory of the new adapter.
        rank: Maximum rank of every update.
        budget: Instead of a rank: bytes, or a size such as "5MB", for all factors, allocated where they keep most
            energy.
        whole: Save norms and biases whole; use False for servers that only support low-rank updates.
        dtype: float32, bfloat16 or float16.
        fan_in_fan_out: Whether weights are stored input × output; by default decided by the config.
        overwrite: Replace `out`.

    Returns:
        A report of the adapter's content, and of what was left out.

    Raises:
        InputError: If nothing of the expert fits an adapter, or `out` cannot be written.

    Example:
        >>> export_expert(library.expert("law"), "law-lora", rank=16)  # doctest: +SKIP
    """
    if budget is not None:
        return extract_lora(
            expert,
            expert.source,
            out,
            rank=rank,
            budget=budget,
            whole=whole,
            dtype=dtype,
            fan_in_fan_out=fan_in_fan_out,
            overwrite=overwrite,
        )
    check_rank(rank)
    stored = dtype_of(dtype, DTYPES, "adapters")
    check_out(Path(out), overwrite, expert.files())
    file = expert.file
    limit = rank or max((_find_own_rank(expert, name) for name in file.kinds), default=1)
    made_by = {"function": "export_expert", "rank": rank, "whole": whole, "dtype": str(dtype)}
    sources = AdapterOrigin(made_by, [(expert.label, expert)])
    draft = _Draft(AdapterModules(expert.source, expert, fan_in_fan_out), expert.source, stored, whole, sources)
    with noting_reads(sources.reads):
        for name in file.kinds:
            factors = None
            if expert.merges(name) and draft.orientation(name, expert.spec(name).shape):
                factors = expert.factors(name, limit)
            draft.add(name, expert, limit if expert.merges(name) else None, factors)
    return draft.write(Path(out), expert, overwrite)


def _find_own_rank(expert: Expert, name: str) -> int:
    """Return the rank a tensor is stored at; at most 64 if it is not stored as factors."""
    if expert.file.kinds[name] == "factors":
        return expert.file.rank(name)
    shape = expert.spec(name).shape
    return min(_DEFAULT_RANK, *matrix_shape(shape)) if is_matrix(shape) else 1


def _find_changed(tuned: Checkpoint, base: Checkpoint, modules: AdapterModules) -> Iterator[str]:
    for name in tuned.names():
        spec = tuned.spec(name)
        known = is_comparable(base, name, spec)
        if modules.is_head(name) or not known or not torch.equal(tuned.read(name), base.read(name).to(spec.dtype)):
            yield name


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _choose_ranks(
    names: Sequence[str], tuned: Checkpoint, base: Checkpoint, draft: _Draft, rank: int, policy: RankPolicy | None
) -> Mapping[str, int]:
    """Return the rank of every low-rank update: one for all, or by a policy."""
    low = [name for name in names if name in base and draft.orientation(name, tuned.spec(name).shape)]
    if policy is None:
        return dict.fromkeys(low, rank)
    squares = {}
    for name in low:
        check_finite(tuned.read(name), name, tuned.label)
        squares[name] = spectrum(as_matrix(task_matrix(base, tuned, name))).double().square()
    if policy.kind == "energy":
        return {
            name: 1 + int((s.cumsum(0) < policy.value * s.sum() * (1 - 1e-12)).sum()) for name, s in squares.items()
        }
    costs = {name: sum(matrix_shape(tuned.spec(name).shape)) * draft.dtype.itemsize for name in low}
    # The components of a matrix have equal cost and decreasing size, so the best come in order.
    steps = sorted(((float(s) / costs[n], n) for n, each in squares.items() for s in each), reverse=True)
    ranks, purse = dict.fromkeys(low, 0), int(policy.value)
    for _, name in steps:
        if costs[name] <= purse:
            ranks[name] += 1
            purse -= costs[name]
    return ranks


@dataclass
class _Draft:
    """An adapter under construction, with the energy of what changed and of what it lacks."""

    modules: AdapterModules
    base: Checkpoint
    dtype: torch.dtype
    whole: bool
    origin: AdapterOrigin
    updates: dict[str, StoredUpdate] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seen: float = 0.0
    lost: float = 0.0
    _energies: dict[str, float] = field(default_factory=dict)

    def orientation(self, name: str, shape: Sequence[int]) -> Orientation | None:
        role = self.modules.role(name, shape)
        return None if role == "whole" else role

    def add(self, name: str, tuned: Checkpoint, rank: int | None, factors: Factors | None = None) -> None:
        """Add a changed tensor, at a rank if it is a matrix; None leaves it out."""
        spec = tuned.spec(name)
        role = self.modules.role(name, spec.shape)
        check_finite(tuned.read(name), name, tuned.label)
        delta = None
        if is_change(self.base, name, spec):
            check_finite(self.base.read(name), name, self.base.label)
            delta = task_matrix(self.base, tuned, name)
            self._energies[name] = float(delta.double().square().sum())
            self.seen += self._energies[name]
        if rank is None or role is None or is_integer(spec.dtype):
            self._leave_out(name)
        elif role == "whole":
            self.saved.append(name) if self.whole or self.modules.is_head(name) else self._leave_out(name)
        elif delta is None or rank == 0:
            self._leave_out(name)
        else:
            matrix = as_matrix(delta)
            found = leading_svd(matrix, rank) if factors is None else factors.truncate(rank)
            window = tuple(spec.shape[2:]) if role == "convolution" else ()
            update = self.updates[name] = StoredUpdate(balanced(found), role, window)
            self.lost += float((matrix.double() - update.product(self.dtype)).square().sum())

    def _leave_out(self, name: str) -> None:
        self.left_out.append(name)
        self.lost += self._energies.get(name, 0.0)

    def write(self, out: Path, tuned: Checkpoint, overwrite: bool, patterns: bool = False) -> AdapterReport:
        if not self.updates:
            raise InputError(f"no weight that an adapter can change differs from {self.base.label}")
        whole, modules, biases = self._read_whole(tuned)
        config = {
            "base_model_name_or_path": self.base.label,
            "fan_in_fan_out": self.modules.fan_in_fan_out,
            "task_type": self.modules.task_type,
            "bias": "all" if biases else None,
        }
        rank = save_adapter(
            out,
            self.updates,
            whole,
            config,
            self.dtype,
            overwrite=overwrite,
            origin=self.origin,
            saved_modules=modules,
            patterns=patterns,
        )
        kept = share(self.seen - self.lost, self.seen)
        return AdapterReport(out, rank, len(self.updates), kept, tuple(self.left_out), tuple(self.saved))

    def _read_whole(self, tuned: Checkpoint) -> tuple[dict[str, Tensor], list[str], bool]:
        """Return the tensors to save whole by their names in the file, the modules that are saved, and whether
        biases are saved beside low-rank updates, under PEFT's names.
        """
        targets = {module_of(name) for name in self.updates}
        files: dict[str, Tensor] = {}
        modules: list[str] = []
        biases = False
        present = group_by_module(tuned.names())
        for module, names in group_by_module(self.saved).items():
            saved_by_peft = self.modules.is_head(f"{module}.") or self.modules.is_norm(module)
            if module and module not in targets and saved_by_peft:
                modules.append(module)
                files |= {name: tuned.read(name) for name in present[module]}
                continue
            for name in names:
                if name.endswith(".bias") and module:
                    files[f"{module}.base_layer.bias" if module in targets else name] = tuned.read(name)
                    biases = True
                else:  # the module has other parameters too
                    self.saved.remove(name)
                    self._leave_out(name)
        return files, modules, biases
