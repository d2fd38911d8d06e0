"""Making the files of a library: what changed, at which ranks it is worth keeping, and the factors themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, TensorSpec, is_integer
from merganser.errors import CheckpointError, MerganserError
from merganser.experts.manifest import ExpertRecord, Manifest
from merganser.experts.ranks import Changed, RankPolicy, allot
from merganser.experts.storage import FACTOR_DTYPES, Slot, encode, header_room, write_expert
from merganser.kernels.spectra import randomized_svd, spectrum, top_svd

Step = Callable[[str, str], None]


@dataclass(frozen=True)
class Compressor:
    """A library being made: its directory, the opened base, and how it was asked to be."""

    directory: Path
    base: Checkpoint
    manifest: Manifest
    randomized: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return FACTOR_DTYPES[self.manifest.dtype]

    def plan(self, experts: Mapping[str, Checkpoint], policy: RankPolicy, on_step: Step) -> dict[str, dict[str, Any]]:
        """The ranks of every expert as JSON: tensor -> rank, None for a tensor kept whole."""
        changed = {}
        for name, expert in experts.items():
            on_step("looking at", name)
            changed[name] = list(changes(self.base, expert, policy.needs_spectra))
        rooms = {name: self._room(name, [(c.name, c.spec) for c in changed[name]]) for name in experts}
        slots = allot(policy, changed, self.dtype, rooms)
        return {
            name: {
                "fingerprint": experts[name].fingerprint(),
                "room": rooms[name],
                "ranks": {slot.name: slot.rank for slot in slots[name]},
            }
            for name in experts
        }

    def compress(self, name: str, expert: Checkpoint, plan: Mapping[str, Any]) -> ExpertRecord:
        """Write the file of one expert as planned."""
        if plan["fingerprint"] != expert.fingerprint():
            raise CheckpointError(f"{expert.label}: has changed since the build of {name!r} was begun")
        slots = [Slot(tensor, expert.spec(tensor), rank) for tensor, rank in plan["ranks"].items()]
        slots = [slot for slot in slots if slot.rank != 0]
        ledger = _Ledger()
        file = f"experts/{name}.safetensors"
        path = self.directory / file
        sha256 = write_expert(
            path, slots, self.dtype, self._metadata(name), plan["room"], self._stored(name, expert, slots, plan, ledger)
        )
        return ExpertRecord(file, path.stat().st_size, sha256, expert.label, plan["fingerprint"], ledger.share)

    def _stored(
        self, name: str, expert: Checkpoint, slots: Sequence[Slot], plan: Mapping[str, Any], ledger: _Ledger
    ) -> Iterator[tuple[Slot, tuple[Tensor, ...]]]:
        decompose = randomized_svd if self.randomized else top_svd
        for dropped in (tensor for tensor, rank in plan["ranks"].items() if rank == 0):
            ledger.add(task_matrix(self.base, expert, dropped), None)
        for slot in slots:
            if slot.rank is None:
                tensor = expert.read(slot.name)
                yield slot, (tensor.to(slot.spec.dtype),)
                continue
            delta = task_matrix(self.base, expert, slot.name)
            try:
                factors = decompose(delta, slot.rank)
            except MerganserError as error:
                raise MerganserError(f"{name}: {slot.name!r}: {error}") from error
            ledger.add(delta, factors.s)
            yield slot, encode(factors, self.dtype, slot.rank)

    def _metadata(self, name: str) -> dict[str, str]:
        return {"expert": name, "base": self.manifest.base_fingerprint}

    def _room(self, name: str, tensors: Sequence[tuple[str, TensorSpec]]) -> int:
        return header_room(tensors, self._metadata(name))


class _Ledger:
    """Energy of task matrices seen and kept."""

    def __init__(self) -> None:
        self._seen = 0.0
        self._lost = 0.0

    def add(self, delta: Tensor, s: Tensor | None) -> None:
        energy = float(delta.double().square().sum())
        self._seen += energy
        self._lost += energy if s is None else max(0.0, energy - float(s.square().sum()))

    @property
    def share(self) -> float:
        return 1 - self._lost / self._seen if self._seen else 1.0


def check_complete(base: Checkpoint, expert: Checkpoint) -> None:
    """A tensor the base has and the expert lacks is an error; heads of its own it may have."""
    for name in base.names():
        if name not in expert:
            raise CheckpointError(f"{expert.label}: has no tensor {name!r}, which the base {base.label} has")


def changes(base: Checkpoint, expert: Checkpoint, spectra: bool) -> Iterator[Changed]:
    """Every tensor of the expert that is not the base's."""
    for name in expert.names():
        spec = expert.spec(name)
        if name not in base or base.spec(name).shape != spec.shape:
            yield Changed(name, spec, False)
            continue
        if torch.equal(expert.read(name), base.read(name).to(spec.dtype)):
            continue
        matrix = len(spec.shape) == 2 and min(spec.shape) > 1 and not is_integer(spec.dtype)
        if not (matrix and spectra):
            yield Changed(name, spec, matrix)
            continue
        squares = spectrum(task_matrix(base, expert, name)).square()
        yield Changed(name, spec, True, squares.numpy())


def task_matrix(base: Checkpoint, expert: Checkpoint, name: str) -> Tensor:
    """θ_t − θ₀, in float32, or float64 where a source is."""
    ours, theirs = base.read(name), expert.read(name)
    wide = torch.float64 if torch.float64 in (ours.dtype, theirs.dtype) else torch.float32
    return theirs.to(wide) - ours.to(wide)
