"""Write the files of a library: find changes, choose how to store them, and store them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, TensorSpec
from merganser.checkpoints.dtypes import dtype_of
from merganser.errors import CheckpointError, MerganserError
from merganser.kernels.spectra import randomized_svd, top_svd
from merganser.lazy import torch
from merganser.library.changes import changes, is_change, task_matrix
from merganser.library.codes.catalogue import TensorChoice
from merganser.library.expert_file import ExpertFile
from merganser.library.manifest import SHARED_FILE, ExpertPlan, ExpertRecord, Manifest, StoredFile, expert_file
from merganser.library.mixing import Mixer, note_dropped
from merganser.library.ranks import RankPolicy, allot
from merganser.library.storage import FACTOR_DTYPES, Slot, encode, header_room, product, write_tensors
from merganser.library.unfolding import as_matrix

if TYPE_CHECKING:
    from torch import Tensor

OnStep = Callable[[str, str], None]


@dataclass(frozen=True)
class Compressor:
    """A library under construction: its directory, the open base, its options, and Gram matrices by expert.

    `on_step` is called with the current step and the name of the expert or tensor.
    """

    directory: Path
    base: Checkpoint
    manifest: Manifest
    randomized: bool = False
    grams: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    on_step: OnStep = lambda action, name: None

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.manifest.dtype, FACTOR_DTYPES)

    def plan(
        self, experts: Mapping[str, Checkpoint], policy: RankPolicy
    ) -> tuple[dict[str, ExpertPlan], dict[str, str]]:
        """Return the plan for every expert, and the codes of their shared part, by tensor."""
        changed = {}
        for name, expert in experts.items():
            self.on_step("looking at", name)
            spectra = policy.needs_spectra and not policy.codes
            changed[name] = list(changes(self.base, expert, spectra, f"expert {name!r}, {expert.label}"))
        prints = {name: expert.fingerprint() for name, expert in experts.items()}
        if policy.codes:
            mixer = self._build_mixer(policy.codes)
            codes, shared = mixer.plan(experts, changed, int(policy.value), self._describe_file, self.on_step)
            return {name: ExpertPlan(prints[name], codes[name]) for name in experts}, shared
        rooms = {
            name: header_room([(c.name, c.spec) for c in changed[name]], self._describe_file(name)) for name in experts
        }
        slots = allot(policy, changed, self.dtype, rooms)
        return {
            name: ExpertPlan(prints[name], room=rooms[name], ranks={slot.name: slot.rank for slot in slots[name]})
            for name in experts
        }, {}

    def share(self, experts: Mapping[str, Checkpoint], plan: Mapping[str, str]) -> StoredFile:
        """Write the file of the shared part as planned."""
        mixer = self._build_mixer(())
        blobs = {
            f"{tensor}::code": _to_tensor(mixer.encode_mean(tensor, experts.values(), TensorChoice.parse(text)).blob)
            for tensor, text in plan.items()
        }
        entries = {key: TensorSpec(tuple(blob.shape), blob.dtype) for key, blob in blobs.items()}
        path = self.directory / SHARED_FILE
        return StoredFile(sha256=write_tensors(path, entries, {}, blobs.items()), nbytes=path.stat().st_size)

    def compress(self, name: str, expert: Checkpoint, plan: ExpertPlan) -> ExpertRecord:
        """Write the file of one expert as planned."""
        if plan.fingerprint != expert.fingerprint():
            raise CheckpointError(f"{expert.label}: has changed since the build of {name!r} started")
        ledger = _Ledger()
        file = expert_file(name)
        path = self.directory / file
        if plan.codes is not None:
            sha256 = self._write_codes(path, name, expert, plan.codes, ledger)
        else:
            slots = [Slot(tensor, expert.spec(tensor), rank) for tensor, rank in plan.ranks.items()]
            entries = {key: spec for slot in slots for key, spec in slot.entries(self.dtype).items()}
            stored = self._encode(name, expert, slots, ledger)
            sha256 = write_tensors(path, entries, self._describe_file(name), stored, plan.room)
        return ExpertRecord(file, path.stat().st_size, sha256, expert.label, plan.fingerprint, ledger.share)

    def _encode(
        self, name: str, expert: Checkpoint, slots: Sequence[Slot], ledger: _Ledger
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors of an expert in plain factors; a slot of rank 0 stores nothing."""
        decompose = randomized_svd if self.randomized else top_svd
        for slot in slots:
            if slot.rank == 0:
                ledger.add(delta := task_matrix(self.base, expert, slot.name), lost=delta)
                continue
            self.on_step("compressing", f"{name}: {slot.name}")
            if slot.rank is None:
                yield f"{slot.name}::full", self._read_whole(expert, slot.name, ledger)
                continue
            delta = as_matrix(task_matrix(self.base, expert, slot.name))
            try:
                factors = decompose(delta, slot.rank)
            except MerganserError as error:
                raise MerganserError(f"{name}: {slot.name!r}: {error}") from error
            stored = encode(factors, self.dtype, slot.rank)
            ledger.add(delta, lost=delta - product(*stored))
            yield from zip(slot.entries(self.dtype), stored, strict=True)

    def _write_codes(self, path: Path, name: str, expert: Checkpoint, codes: Mapping[str, str], ledger: _Ledger) -> str:
        """Write the file of an expert in codes; they are computed first because they decide its size."""
        mixer = self._build_mixer(())
        blobs: dict[str, Tensor] = {}
        whole: dict[str, TensorSpec] = {}
        dropped: dict[str, float] = {}
        for tensor, choice in ((tensor, TensorChoice.parse(text)) for tensor, text in codes.items()):
            self.on_step("compressing", f"{name}: {tensor}")
            if choice.full:
                whole[f"{tensor}::full"] = expert.spec(tensor)
                continue
            delta = task_matrix(self.base, expert, tensor)
            if choice.code is None:
                ledger.add(delta, lost=delta)
                dropped[tensor] = _energy(delta)
                continue
            coded, lost = mixer.encode(name, tensor, delta, choice)
            blobs[f"{tensor}::{'residual' if choice.residual else 'code'}"] = _to_tensor(coded.blob)
            ledger.add(delta, lost=lost)
        entries = whole | {key: TensorSpec(tuple(blob.shape), blob.dtype) for key, blob in blobs.items()}

        def stored() -> Iterator[tuple[str, Tensor]]:
            yield from blobs.items()
            for key in whole:
                yield key, self._read_whole(expert, key.removesuffix("::full"), ledger)

        metadata = self._describe_file(name) | ({"dropped": note_dropped(dropped)} if dropped else {})
        return write_tensors(path, entries, metadata, stored())

    def _read_whole(self, expert: Checkpoint, tensor: str, ledger: _Ledger) -> Tensor:
        spec = expert.spec(tensor)
        if is_change(self.base, tensor, spec):
            ledger.add(task_matrix(self.base, expert, tensor))
        return expert.read(tensor).to(spec.dtype)

    def _build_mixer(self, codes: Sequence[str]) -> Mixer:
        shared = ExpertFile(self.directory / SHARED_FILE) if self.manifest.shared else None
        return Mixer(self.base, codes, self.grams, shared, self.randomized)

    def _describe_file(self, name: str) -> dict[str, str]:
        return {"expert": name, "base": self.manifest.base_fingerprint}


class _Ledger:
    """Sums of ‖expert − base‖² and of the loss; the share 1 − Σ‖Δ − stored Δ‖² / Σ‖Δ‖² is kept."""

    def __init__(self) -> None:
        self._seen = 0.0
        self._lost = 0.0

    def add(self, delta: Tensor, lost: Tensor | None = None) -> None:
        """Add a change; `lost` is Δ − stored Δ, None if the tensor is kept whole."""
        self._seen += _energy(delta)
        self._lost += 0.0 if lost is None else _energy(lost)

    @property
    def share(self) -> float:
        return max(0.0, 1 - self._lost / self._seen) if self._seen else 1.0


def _energy(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def _to_tensor(blob: bytes) -> Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)
