"""The expert library: many experts of one base as low-rank factors (TSV-Compress), or in codes within a budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.dtypes import dtype_name
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.confine import confine
from merganser.errors import CheckpointError, InputError, did_you_mean, require_mapping
from merganser.kernels.spectra import Factors
from merganser.library.bases import open_base, place_of, weights_checksum
from merganser.library.build_start import begin_build, factor_dtype, find_interrupted_build, make_directory
from merganser.library.building import Compressor, OnStep
from merganser.library.changes import check_fit
from merganser.library.codes.catalogue import CHOICES
from merganser.library.collection import ExpertCollection
from merganser.library.expert_file import ExpertFile
from merganser.library.manifest import (
    SHARED_FILE,
    ExpertPlan,
    ExpertRecord,
    Manifest,
    check_name,
    expert_file,
    lock_library,
)
from merganser.library.ranks import RankPolicy, with_codes
from merganser.library.sizes import Finding, Size
from merganser.library.storage import FACTOR_DTYPES, delete, find_damage, partial_of
from merganser.library.views import Expert, MergedExperts
from merganser.methods.registry import build as build_method
from merganser.methods.tsv import TSV
from merganser.notebooks import Shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Library(ExpertCollection, Shown):
    """Experts of one base, stored in a directory as low-rank factors or in codes. Create one with `Library.build`.

    Args:
        path: The directory of the library.
        base: Where the base is now, if it was moved.

    Raises:
        CheckpointError: If there is no library, its build was interrupted, or the base is another one.

    Example:
        >>> built = mg.library.Library.build("base", {"math": "math", "code": "code"}, "lib", rank_fraction=0.5)
        >>> mg.library.Library("lib").experts
        ('math', 'code')
    """

    def __init__(self, path: str | os.PathLike[str], base: Reference | None = None) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        if self.manifest.pending:
            missing = ", ".join(sorted(self.manifest.pending))
            raise CheckpointError(
                f"{self.path}: incomplete: {missing} not finished; build it again with the same experts to continue"
            )
        place = self.path / self.manifest.base if self.manifest.base_copied else self.manifest.base
        known = (self.manifest.base_fingerprint, self.manifest.source_fingerprint)
        self.base = open_base(self.path, place, known, base)
        self._checked: dict[str, Expert] = {}
        self._shared: ExpertFile | None = None

    @classmethod
    def build(
        cls,
        base: Reference,
        experts: Mapping[str, Reference],
        path: str | os.PathLike[str],
        *,
        rank_fraction: float | None = None,
        energy: float | None = None,
        budget: int | str | None = None,
        codes: Sequence[str] | None = None,
        grams: Mapping[str, Reference] | None = None,
        dtype: str | torch.dtype | None = None,
        copy_base: bool = False,
        randomized: bool = False,
        on_step: OnStep = lambda action, name: None,
    ) -> Library:
        """Compress experts into a directory. Call it again to continue a build that was interrupted.

        Args:
            base: The base of all experts. A base in memory is copied into the library.
            experts: The experts by name.
            path: The directory to create.
            rank_fraction: The share of singular components to keep; 1/T by default.
            energy: Instead: the share of the energy to keep in each matrix.
            budget: Instead: the size of all expert files, in bytes or as text such as `"1MB"`. Every tensor gets the
                code that loses least for its bytes, unless `dtype` asks for plain factors.
            codes: The codes a budget may use: some of `"signs"`, `"levels"`, `"factors"`, and `"shared"` for a part
                that experts have in common; by default all.
            grams: Gram matrices of inputs by expert, as `mg.tuning.linear_grams` computes them. Errors of these experts
                then count by their effect on the layers' outputs.
            dtype: The dtype of plain factors: float32, bfloat16, float16, or int8 with a scale per column; by default
                that of the base.
            copy_base: Copy the base into the library.
            randomized: Use a randomised SVD, which is faster and slightly less accurate.
            on_step: Called with the current step and the name of the expert or tensor.

        Returns:
            The library.

        Raises:
            InputError: If names or sizes are invalid, or an expert does not fit the base.
        """
        require_mapping("experts", experts)
        if not experts:
            raise InputError("a library needs at least one expert")
        for name in experts:
            check_name(name)
        directory = Path(path)
        opened = open_checkpoint(base)
        checkpoints = {name: open_checkpoint(reference) for name, reference in experts.items()}
        for checkpoint in checkpoints.values():
            check_fit(opened, checkpoint)
        policy = RankPolicy.choose(rank_fraction, energy, budget, len(experts))
        policy = with_codes(policy, codes, CHOICES if dtype is None else ())
        if codes is not None and dtype is not None:
            raise InputError("dtype is for plain factors; leave it out if codes are given")
        weights = _open_grams(grams or {}, policy, experts)
        factors = factor_dtype(opened) if dtype is None else dtype_name(dtype, FACTOR_DTYPES, "factors")
        place = place_of(base)
        copied = copy_base or place is None  # a base in memory can only be found again as a copy
        wanted = Manifest(
            base="base" if copied or place is None else place,
            base_copied=copied,
            base_fingerprint=opened.fingerprint(),
            source_fingerprint=opened.fingerprint(),
            dtype=factors,
            policy=policy,
            pending={name: ExpertPlan(checkpoint.fingerprint()) for name, checkpoint in checkpoints.items()},
        )
        compressor = Compressor(directory, opened, wanted, randomized, weights, on_step)
        shared: dict[str, str] = {}
        if find_interrupted_build(directory, wanted) is None:  # plan everything before writing anything
            planned, shared = compressor.plan(checkpoints, policy)
            wanted = replace(wanted, pending=planned)
        make_directory(directory)
        with lock_library(directory):
            if (manifest := find_interrupted_build(directory, wanted)) is None:
                if shared:
                    wanted = replace(wanted, shared=compressor.share(checkpoints, shared))
                manifest = begin_build(directory, wanted, opened)
            compressor = replace(compressor, manifest=manifest)
            for name in list(manifest.pending):
                record = compressor.compress(name, checkpoints[name], manifest.pending[name])
                manifest = manifest.with_expert(name, record)
                manifest.write(directory)
        return cls(directory, None if copied else opened)

    def add(
        self,
        name: str,
        expert: Reference,
        *,
        rank_fraction: float | None = None,
        energy: float | None = None,
        budget: int | str | None = None,
        codes: Sequence[str] | None = None,
        gram: Reference | None = None,
        randomized: bool = False,
        on_step: OnStep = lambda action, name: None,
    ) -> Library:
        """Add an expert, by default with the rule of the library, and return the new library.

        A library built within a budget gives a new expert the mean size of the others, or the whole budget if there are
        none. No other file changes, and this object keeps its experts.

        Args:
            name: The name of the expert.
            expert: Its checkpoint.
            rank_fraction: The share of singular components to keep.
            energy: Instead: the share of the energy to keep in each matrix.
            budget: Instead: the size of its file, in bytes or as text.
            codes: The codes a budget may use; by default those of the library.
            gram: Gram matrices of its inputs.
            randomized: Use a randomised SVD.
            on_step: Called with what is done and the name of the expert or tensor.
        """
        check_name(name)
        told = (rank_fraction, energy, budget) != (None, None, None)
        opened = open_checkpoint(expert)
        check_fit(self.base, opened)
        with lock_library(self.path):
            current = Library(self.path, self.base)  # the library may have changed since it was opened
            if name in current:
                raise InputError(f"{self.path}: has an expert {name!r} already; remove it first")
            own = current._choose_policy()
            policy = RankPolicy.choose(rank_fraction, energy, budget, 1) if told else replace(own, codes=())
            policy = with_codes(policy, codes, own.codes)
            weights = _open_grams({name: gram} if gram is not None else {}, policy, [name])
            compressor = Compressor(self.path, self.base, current.manifest, randomized, weights, on_step)
            plan, _ = compressor.plan({name: opened}, policy)
            record = compressor.compress(name, opened, plan[name])
            current.manifest.with_expert(name, record).write(self.path)
        return Library(self.path, self.base)

    def remove(self, name: str) -> Library:
        """Remove an expert, delete its file, and return the new library.

        If a removal was interrupted, repeat it to delete the file.
        """
        check_name(name)
        file = confine(self.path, expert_file(name), f"{self.path}: experts")
        with lock_library(self.path):
            current = Library(self.path, self.base)
            files = [path for path in (file, partial_of(file)) if os.path.lexists(path)]
            if name in current:
                current.manifest.without(name).write(self.path)
            elif not files:
                current._record(name)  # raises an error that lists the experts
            for path in files:
                delete(path)
        return Library(self.path, self.base)

    @property
    def experts(self) -> tuple[str, ...]:
        return tuple(self.manifest.experts)

    def __reduce__(self) -> tuple[type[Library], tuple[Path, Checkpoint]]:
        return Library, (self.path, self.base)

    def expert(self, name: str) -> Expert:
        """Return an expert as a checkpoint, rebuilt while it is read. Its file is verified by its checksum once."""
        if name not in self._checked:
            record = self._record(name)
            if problem := find_damage(self.path / record.file, record):
                raise CheckpointError(f"{self.path / record.file}: {problem}; build or add the expert {name!r} again")
            self._checked[name] = Expert(self.base, self._open_file(record), name)
        return self._checked[name]

    def shared(self) -> ExpertFile | None:
        """Return the file of the shared part, if there is one; it is verified by its checksum once."""
        if self._shared is None and self.manifest.shared is not None:
            if problem := find_damage(self.path / SHARED_FILE, self.manifest.shared):
                raise CheckpointError(f"{self.path / SHARED_FILE}: {problem}; build the library again")
            self._shared = ExpertFile(self.path / SHARED_FILE)
        return self._shared

    def _open_file(self, record: ExpertRecord) -> ExpertFile:
        return ExpertFile(self.path / record.file, self.shared())

    def is_shared(self, tensor: str) -> bool:
        """Return whether the base has a float tensor of this name, and every expert has it in the base's shape."""
        return tensor in self.base and all(self.expert(name).merges(tensor) for name in self.experts)

    def factors(self, name: str, tensor: str) -> Factors | None:
        """Return the task matrix of one tensor of an expert as float64 factors; None if the expert did not change
        it.
        """
        return self.expert(name).factors(tensor)

    def merge(self, names: Sequence[str] | None = None, **parameters: Any) -> MergedExperts:
        """Merge experts (by default all) by TSV-Merge, directly from the stored factors.

        `parameters` are those of the method `tsv`; convolution kernels are merged as matrices unless `convolutions` is
        false. The result is a checkpoint computed while it is read: `state_dict()` loads it into memory, `mg.save`
        writes it. Tensors that an expert does not share with the base are left out.
        """
        if isinstance(names, str):
            raise InputError(f"experts to merge are a list: write [{names!r}]")
        chosen = list(self.experts) if names is None else list(names)
        if not chosen or len(set(chosen)) < len(chosen):
            raise InputError("merge needs at least one expert, and each of them once")
        rule = build_method(TSV, {"convolutions": True} | parameters, chosen)
        assert isinstance(rule, TSV)
        return MergedExperts(self.base, [self.expert(name) for name in chosen], rule)

    def extract(self, name: str, out: str | os.PathLike[str], **options: Any) -> Path:
        """Rebuild an expert as an ordinary checkpoint directory (options of `mg.save`)."""
        from merganser.recipes.saving import save

        return save(self.expert(name), out, **options)

    def size(self) -> Size:
        """Return the bytes on disk of the base's weights, of every expert, and of their shared part."""
        shared = self.manifest.shared.nbytes if self.manifest.shared else 0
        return Size(self.base.nbytes, {name: record.nbytes for name, record in self.manifest.experts.items()}, shared)

    def verify(self, on_part: Callable[[str], None] = lambda part: None) -> list[Finding]:
        """Read every byte of the base and of the experts, and compare their checksums with the manifest."""
        on_part("base")
        findings = [self._verify_base()]
        if self.manifest.shared is not None:
            problem = find_damage(self.path / SHARED_FILE, self.manifest.shared)
            findings.append(Finding("shared", problem is None, problem or "the shared part is intact"))
        for name, record in self.manifest.experts.items():
            on_part(name)
            problem = find_damage(self.path / record.file, record)
            if problem is None:
                try:
                    Expert(self.base, self._open_file(record), name)
                except CheckpointError as error:
                    problem = str(error)
            findings.append(Finding(name, problem is None, problem or f"{record.energy:.1%} of its energy kept"))
        known = {record.file for record in self.manifest.experts.values()}
        for path in sorted((self.path / "experts").glob("*")):
            if f"experts/{path.name}" not in known:
                findings.append(Finding(path.name, False, "not in the manifest; left behind by an interrupted change"))
        return findings

    def _verify_base(self) -> Finding:
        expected = self.manifest.base_sha256
        if expected is None:
            return Finding(
                "base", None, f"{self.base.label} looks right, but the library has no checksum of its weights"
            )
        if weights_checksum(self.base) != expected:
            return Finding("base", False, f"{self.base.label}: its weights have changed since the library was built")
        return Finding("base", True, f"{self.base.label} is the base of this library")

    def _choose_policy(self) -> RankPolicy:
        """Return the rule for the ranks of a new expert."""
        own = self.manifest.policy
        if own.kind != "budget" or not self.experts:
            return own
        return replace(own, value=sum(self.size().experts.values()) // len(self))

    def _record(self, name: str) -> ExpertRecord:
        if name not in self.manifest.experts:
            raise InputError(f"{self.path}: has no expert {name!r}{did_you_mean(name, self.experts)}")
        return self.manifest.experts[name]


def _open_grams(
    grams: Mapping[str, Reference], policy: RankPolicy, experts: Collection[str]
) -> dict[str, Mapping[str, Tensor]]:
    """Return the Gram matrices by expert, if the policy can use them."""
    if grams and not policy.codes:
        raise InputError("Gram matrices weight the errors of codes; give a budget, and no dtype of factors")
    for name in grams:
        if name not in experts:
            raise InputError(f"grams: there is no expert {name!r}{did_you_mean(name, experts)}")
    return {name: open_checkpoint(reference) for name, reference in grams.items()}


def open_expert(path: Path) -> Checkpoint:
    """Return the expert of a library that a path names, for `merganser.open`."""
    if path.is_dir():
        known = ", ".join(Library(path).experts)
        raise CheckpointError(f"{path}: an expert library; open one of {known} as {path}/experts/NAME.safetensors")
    return Library(path.parent.parent).expert(path.stem)
