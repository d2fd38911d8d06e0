"""The expert library (TSV-Compress): many experts of one base in about twice the base's size."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.dtypes import dtype_name, name_of
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.confine import confine
from merganser.engine.directories import check_writable
from merganser.errors import CheckpointError, InputError, by_name, did_you_mean
from merganser.kernels.spectra import Factors
from merganser.lazy import torch
from merganser.library import storage
from merganser.library.bases import main_dtype, open_base, place_of, weights_checksum
from merganser.library.building import Compressor, Step, check_fit
from merganser.library.manifest import FILE, LOCK, ExpertRecord, Manifest, check_name, expert_file, locked
from merganser.library.ranks import RankPolicy
from merganser.library.storage import FACTOR_DTYPES, ExpertFile, checksum, delete, partial_of
from merganser.library.views import Expert, MergedExperts
from merganser.methods.registry import build as build_method
from merganser.methods.tsv import TSV
from merganser.notebooks import Shown
from merganser.recipes.saving import save


@dataclass(frozen=True)
class Size:
    """Bytes: the base's weights, the files of the experts, and how much the whole is of the base alone."""

    base: int
    experts: Mapping[str, int]

    @property
    def total(self) -> int:
        return self.base + sum(self.experts.values())

    @property
    def ratio(self) -> float:
        return self.total / max(1, self.base)


@dataclass(frozen=True)
class Finding:
    """What `verify` has to say of one part of a library. `sound` is None where it could not be found out."""

    part: str
    sound: bool | None
    message: str


class Library(Shown):
    """Experts of one base, stored in a directory as low-rank factors. Create one with `Library.build`.

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
                f"{self.path}: half-written: {missing} not finished; build it again with the same experts to go on"
            )
        place = self.path / self.manifest.base if self.manifest.base_copied else self.manifest.base
        known = (self.manifest.base_fingerprint, self.manifest.source_fingerprint)
        self.base = open_base(self.path, place, known, base)
        self._checked: dict[str, Expert] = {}

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
        dtype: str | torch.dtype | None = None,
        copy_base: bool = False,
        randomized: bool = False,
        on_step: Step = lambda action, name: None,
    ) -> Library:
        """Compress experts into a directory. Call it again to continue a build that was interrupted.

        Args:
            base: The base of all experts. A base in memory is copied into the library.
            experts: The experts by name.
            path: The directory to create.
            rank_fraction: The share of singular components to keep; 1/T by default.
            energy: Instead: the share of the energy to keep in each matrix.
            budget: Instead: the size of all expert files, in bytes or as text such as `"1MB"`.
            dtype: The dtype of the factors: float32, bfloat16, float16, or int8 with a scale per column; by default
                that of the base.
            copy_base: Copy the base into the library.
            randomized: Use a randomised SVD, which is faster and slightly less accurate.
            on_step: Called with what is done and the name of the expert or tensor.

        Returns:
            The library.

        Raises:
            InputError: If names or sizes are wrong, or an expert does not fit the base.
        """
        by_name("experts", experts)
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
        factors = _factor_dtype(opened) if dtype is None else dtype_name(dtype, FACTOR_DTYPES, "factors")
        place = place_of(base)
        copied = copy_base or place is None  # of tensors in memory nothing but a copy can be found again
        wanted = Manifest(
            base="base" if copied or place is None else place,
            base_copied=copied,
            base_fingerprint=opened.fingerprint(),
            source_fingerprint=opened.fingerprint(),
            dtype=factors,
            policy=policy.to_dict(),
            pending={name: {"fingerprint": ckpt.fingerprint()} for name, ckpt in checkpoints.items()},
        )
        if _interrupted(directory, wanted) is None:  # ranks are planned before anything is written
            planned = Compressor(directory, opened, wanted, randomized).plan(checkpoints, policy, on_step)
            wanted = replace(wanted, pending=planned)
        _make(directory)
        with locked(directory):
            manifest = _interrupted(directory, wanted) or _begin(directory, wanted, opened)
            compressor = Compressor(directory, opened, manifest, randomized)
            for name in list(manifest.pending):
                on_step("compressing", name)
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
        randomized: bool = False,
    ) -> Library:
        """The library with one more expert, by the library's own rule for ranks unless told otherwise. One built within
        a budget gives a new expert the mean size of the others, or all of the budget if there is none. No other file is
        touched, and this object goes on to show what it was opened with."""
        check_name(name)
        told = (rank_fraction, energy, budget) != (None, None, None)
        policy = RankPolicy.choose(rank_fraction, energy, budget, 1) if told else None
        opened = open_checkpoint(expert)
        check_fit(self.base, opened)
        with locked(self.path):
            current = Library(self.path, self.base)  # it may have changed since this one was opened
            if name in current:
                raise InputError(f"{self.path}: has an expert {name!r} already; remove it first")
            compressor = Compressor(self.path, self.base, current.manifest, randomized)
            plan = compressor.plan({name: opened}, policy or current._policy(), lambda action, which: None)
            current.manifest.with_expert(name, compressor.compress(name, opened, plan[name])).write(self.path)
        return Library(self.path, self.base)

    def remove(self, name: str) -> Library:
        """The library without an expert; its file is deleted.

        A removal that was interrupted may have left the file behind: doing it again deletes it.
        """
        check_name(name)
        file = confine(self.path, expert_file(name), f"{self.path}: experts")
        with locked(self.path):
            current = Library(self.path, self.base)
            files = [path for path in (file, partial_of(file)) if os.path.lexists(path)]
            if name in current:
                current.manifest.without(name).write(self.path)
            elif not files:
                current._record(name)  # says which experts there are
            for path in files:
                delete(path)
        return Library(self.path, self.base)

    @property
    def experts(self) -> tuple[str, ...]:
        return tuple(self.manifest.experts)

    def __len__(self) -> int:
        return len(self.manifest.experts)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.experts

    def expert(self, name: str) -> Expert:
        """An expert as a checkpoint, rebuilt as it is read. Its file is checked against its checksum once."""
        if name not in self._checked:
            record = self._record(name)
            if problem := self._damage(record):
                raise CheckpointError(f"{self.path / record.file}: {problem}; build or add the expert {name!r} again")
            self._checked[name] = Expert(self.base, ExpertFile(self.path / record.file), name)
        return self._checked[name]

    def factors(self, name: str, tensor: str) -> Factors | None:
        """The task matrix of one tensor of an expert as float64 factors; None if the expert did not change it."""
        return self.expert(name).factors(tensor)

    def merge(self, names: Sequence[str] | None = None, **parameters: Any) -> MergedExperts:
        """TSV-Merge of some experts (all of them by default), straight from the stored factors.

        `parameters` are those of the method `tsv`; convolution kernels are merged as matrices unless `convolutions` is
        false. The result is a checkpoint computed as it is read; `state_dict()`
        gives it in memory, `mg.save` puts it on disk. Tensors an expert does not share with the base stay out of it.
        """
        chosen = list(self.experts) if names is None else list(names)
        if not chosen or len(set(chosen)) < len(chosen):
            raise InputError("merge needs at least one expert, and each of them once")
        rule = build_method(TSV, {"convolutions": True} | parameters, chosen)
        assert isinstance(rule, TSV)
        return MergedExperts(self.base, [self.expert(name) for name in chosen], rule)

    def extract(self, name: str, out: str | os.PathLike[str], **options: Any) -> Path:
        """Rebuild an expert as an ordinary checkpoint directory (options of `mg.save`)."""
        return save(self.expert(name), out, **options)

    def size(self) -> Size:
        """Bytes on disk of the base's weights and of every expert."""
        weights = sum(self.base.spec(name).nbytes for name in self.base.names())
        return Size(weights, {name: record.nbytes for name, record in self.manifest.experts.items()})

    def verify(self, on_part: Callable[[str], None] = lambda part: None) -> list[Finding]:
        """Read every byte of the base and of the experts, and compare their checksums with the manifest."""
        on_part("base")
        findings = [self._verify_base()]
        for name, record in self.manifest.experts.items():
            on_part(name)
            problem = self._damage(record)
            if problem is None:
                try:
                    Expert(self.base, ExpertFile(self.path / record.file), name)
                except CheckpointError as error:
                    problem = str(error)
            findings.append(Finding(name, problem is None, problem or f"{record.energy:.1%} of its energy kept"))
        known = {record.file for record in self.manifest.experts.values()}
        for path in sorted((self.path / "experts").glob("*")):
            if f"experts/{path.name}" not in known:
                findings.append(Finding(path.name, False, "not in the manifest; left by an interrupted change"))
        return findings

    def _verify_base(self) -> Finding:
        expected = self.manifest.base_sha256
        if expected is None:
            return Finding(
                "base", None, f"{self.base.label} looks right, but the library has no checksum of its weights"
            )
        if weights_checksum(self.base) != expected:
            return Finding("base", False, f"{self.base.label}: its weights have changed since the library was built")
        return Finding("base", True, f"{self.base.label} is the base this library was built on")

    def _policy(self) -> RankPolicy:
        """The rule for the ranks of one more expert."""
        own = RankPolicy(**self.manifest.policy)
        if own.kind != "budget" or not self.experts:
            return own
        return RankPolicy("budget", sum(self.size().experts.values()) // len(self))

    def _record(self, name: str) -> ExpertRecord:
        if name not in self.manifest.experts:
            raise InputError(f"{self.path}: has no expert {name!r}{did_you_mean(name, self.experts)}")
        return self.manifest.experts[name]

    def _damage(self, record: ExpertRecord) -> str | None:
        path = self.path / record.file
        if not path.is_file():
            return "missing"
        if path.stat().st_size != record.nbytes:
            return f"damaged: {path.stat().st_size} bytes, the library says {record.nbytes}"
        return None if checksum(path) == record.sha256 else "damaged: its checksum is not the library's"


def _interrupted(directory: Path, wanted: Manifest) -> Manifest | None:
    """The manifest of an interrupted build of the same library, if there is one; refuses whatever else is there."""
    check_writable(directory, directory)
    present = set(os.listdir(directory)) if os.path.isdir(directory) else set()
    if FILE not in present:
        begun = {"experts", LOCK}  # by a build that was interrupted before its manifest, and nothing else
        if begun <= present:
            begun |= {"base", "base.partial", ".base.lock", f"{FILE}.partial"}
        if present - begun or ("experts" in present and any((directory / "experts").iterdir())):
            raise InputError(f"{directory}: exists and is not an expert library; choose another path")
        return None
    found = Manifest.read(directory)
    if not found.pending:
        raise InputError(f"{directory}: is a finished library; use `add` for another expert, or another path")
    unlike = [
        what
        for what, ours, theirs in (
            ("base", wanted.source_fingerprint, found.source_fingerprint),
            ("place of the base", wanted.base, found.base),
            ("dtype", wanted.dtype, found.dtype),
            ("rule for ranks", wanted.policy, found.policy),
            ("experts", _sources(wanted), _sources(found)),
        )
        if ours != theirs
    ]
    if unlike:
        raise InputError(f"{directory}: a build with another {unlike[0]} was interrupted here; remove it first")
    return found


def _make(directory: Path) -> None:
    try:
        storage.DISK.make_directory(directory / "experts")
    except OSError as error:
        raise InputError(f"{directory}: cannot be made: {error.strerror}") from None


def _begin(directory: Path, wanted: Manifest, base: Checkpoint) -> Manifest:
    """The manifest of a new library, on disk, after the copy of the base if there is to be one."""
    if wanted.base_copied:
        # Goes on with an unfinished copy, leaves a finished one as it is, and refuses whatever else is there.
        base = open_checkpoint(save(base, directory / "base", resume=True, disk=storage.DISK))
        wanted = replace(wanted, base_fingerprint=base.fingerprint())
    wanted = replace(wanted, base_sha256=weights_checksum(base))
    wanted.write(directory)
    return wanted


def _sources(manifest: Manifest) -> dict[str, str]:
    done = {name: record.fingerprint for name, record in manifest.experts.items()}
    return done | {name: plan["fingerprint"] for name, plan in manifest.pending.items()}


def _factor_dtype(base: Checkpoint) -> str:
    name = name_of(main_dtype(base))
    return name if name in FACTOR_DTYPES else "float32"


def open_expert(path: Path) -> Checkpoint:
    """The expert of a library that a path names, for `merganser.open`."""
    if path.is_dir():
        known = ", ".join(Library(path).experts)
        raise CheckpointError(f"{path}: an expert library; name one of {known} as {path}/experts/NAME.safetensors")
    return Library(path.parent.parent).expert(path.stem)
