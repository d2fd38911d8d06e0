"""Making the files of a library: what changed, at which ranks it is worth keeping, and the factors themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, TensorSpec, is_integer
from merganser.checkpoints.dtypes import dtype_of
from merganser.checkpoints.quantised import refuse_quantised
from merganser.errors import CheckpointError, MerganserError
from merganser.kernels.spectra import randomized_svd, spectrum, top_svd
from merganser.lazy import torch
from merganser.library.manifest import ExpertRecord, Manifest, expert_file
from merganser.library.ranks import Changed, RankPolicy, allot
from merganser.library.storage import FACTOR_DTYPES, Slot, encode, header_room, product, write_expert
from merganser.library.unfolding import as_matrix, is_matrix

if TYPE_CHECKING:
    from torch import Tensor

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
        return dtype_of(self.manifest.dtype, FACTOR_DTYPES)

    def plan(self, experts: Mapping[str, Checkpoint], policy: RankPolicy, on_step: Step) -> dict[str, dict[str, Any]]:
        """The ranks of every expert as JSON: tensor -> rank, None for a tensor kept whole."""
        changed = {}
        for name, expert in experts.items():
            on_step("looking at", name)
            changed[name] = list(changes(self.base, expert, policy.needs_spectra, f"expert {name!r}, {expert.label}"))
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
        file = expert_file(name)
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
            ledger.add(delta := task_matrix(self.base, expert, dropped), lost=delta)
        for slot in slots:
            if slot.rank is None:
                if is_change(self.base, slot.name, slot.spec):
                    ledger.add(task_matrix(self.base, expert, slot.name))
                yield slot, (expert.read(slot.name).to(slot.spec.dtype),)
                continue
            delta = as_matrix(task_matrix(self.base, expert, slot.name))
            try:
                factors = decompose(delta, slot.rank)
            except MerganserError as error:
                raise MerganserError(f"{name}: {slot.name!r}: {error}") from error
            stored = encode(factors, self.dtype, slot.rank)
            ledger.add(delta, lost=delta - product(*stored))
            yield slot, stored

    def _metadata(self, name: str) -> dict[str, str]:
        return {"expert": name, "base": self.manifest.base_fingerprint}

    def _room(self, name: str, tensors: Sequence[tuple[str, TensorSpec]]) -> int:
        return header_room(tensors, self._metadata(name))


class _Ledger:
    """‖expert − base‖² as it was seen, and as much of it as storing lost: 1 − Σ‖Δ − stored Δ‖² / Σ‖Δ‖² is kept."""

    def __init__(self) -> None:
        self._seen = 0.0
        self._lost = 0.0

    def add(self, delta: Tensor, lost: Tensor | None = None) -> None:
        """`lost` is Δ − stored Δ, None where the tensor is kept whole."""
        self._seen += _energy(delta)
        self._lost += 0.0 if lost is None else _energy(lost)

    @property
    def share(self) -> float:
        return max(0.0, 1 - self._lost / self._seen) if self._seen else 1.0


def _energy(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def is_change(base: Checkpoint, name: str, spec: TensorSpec) -> bool:
    """Whether a tensor of an expert differs from the base by a Δ: numbers of a tensor that both have in one shape."""
    return name in base and base.spec(name).shape == spec.shape and not is_integer(spec.dtype)


def check_fit(base: Checkpoint, expert: Checkpoint) -> None:
    """A tensor the base has and the expert lacks is an error, and so are codes; heads of its own it may have."""
    for checkpoint in (base, expert):
        refuse_quantised(checkpoint)
    for name in base.names():
        if name not in expert:
            raise CheckpointError(f"{expert.label}: has no tensor {name!r}, which the base {base.label} has")


def check_finite(tensor: Tensor, name: str, where: str) -> None:
    """NaN and infinity are no change that could be kept, compared or merged. `where` names the model."""
    if is_integer(tensor.dtype):
        return
    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor
    # A sum is the cheapest sieve: only a suspicious one is looked at twice.
    if not bool(wide.sum().isfinite()) and not bool(wide.isfinite().all()):
        what = "NaN" if bool(wide.isnan().any()) else "infinite values"
        raise CheckpointError(f"{where}: tensor {name!r} contains {what}; use a sound checkpoint")


def changes(base: Checkpoint, expert: Checkpoint, spectra: bool, where: str) -> Iterator[Changed]:
    """Every tensor of the expert that is not the base's; `where` is how messages call the expert."""
    for name in expert.names():
        spec = expert.spec(name)
        theirs = expert.read(name)
        if name not in base or base.spec(name).shape != spec.shape:
            check_finite(theirs, name, where)
            yield Changed(name, spec, False)
            continue
        ours = base.read(name)
        if torch.equal(theirs, ours.to(spec.dtype)):
            continue
        check_finite(theirs, name, where)
        check_finite(ours, name, base.label)
        matrix = is_matrix(spec.shape) and not is_integer(spec.dtype)
        if not (matrix and spectra):
            yield Changed(name, spec, matrix)
            continue
        squares = spectrum(as_matrix(task_matrix(base, expert, name))).square()
        yield Changed(name, spec, True, squares.numpy())


def task_matrix(base: Checkpoint, expert: Checkpoint, name: str) -> Tensor:
    """θ_t − θ₀ in the tensor's own shape, in float32, or float64 where a source is."""
    ours, theirs = base.read(name), expert.read(name)
    wide = torch.float64 if torch.float64 in (ours.dtype, theirs.dtype) else torch.float32
    return theirs.to(wide) - ours.to(wide)
