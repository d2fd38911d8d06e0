"""Plan and encode a library within a byte budget, with the best code for each tensor.

Every changed tensor of every expert is encoded in all ways of the catalogue. The bytes and the loss of each, as a share
of the expert's energy, are points of a curve, and `choosing` allocates the budget along the curves. If experts have
much in common, their mean change may be stored once, in more bits, and only the residual of each expert (TVQ, Kim et
al. 2025, arXiv:2503.06921).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from merganser.checkpoints.base import Checkpoint, TensorSpec
from merganser.checkpoints.safetensors_file import CODES
from merganser.errors import InputError
from merganser.library.changes import is_change, task_matrix
from merganser.library.choosing import Mode, Option, choose, choose_modes
from merganser.library.codes.catalogue import SHARED, TensorChoice, candidates
from merganser.library.codes.coding import Coded, Delta, decode, dense, encode
from merganser.library.expert_file import ExpertFile

if TYPE_CHECKING:
    from torch import Tensor

    from merganser.library.ranks import Changed

CodePlan: TypeAlias = "dict[str, str]"
#: The shared part keeps all but this share of its energy: it has more bits than the residuals.
_SHARED_ERROR = 0.05
#: Upper bound of the size of an expert file, for the digits in its header.
_LARGEST = 10**12 - 1


@dataclass(frozen=True)
class Mixer:
    """Encodes changes of experts of one base.

    Args:
        base: The base.
        codes: Names of the codes to choose from, and whether experts may share a part.
        grams: Gram matrices of inputs, by expert and by tensor.
        shared: The existing shared part of the library.
        randomized: Use a randomised SVD with a quarter of the components.
    """

    base: Checkpoint
    codes: Sequence[str]
    grams: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    shared: ExpertFile | None = None
    randomized: bool = False

    def plan(
        self,
        experts: Mapping[str, Checkpoint],
        changed: Mapping[str, Sequence[Changed]],
        budget: int,
        metadata: Callable[[str], Mapping[str, str]],
        on_step: Callable[[str, str], None],
    ) -> tuple[dict[str, CodePlan], CodePlan]:
        """Choose how to store every changed tensor of every expert, within a budget.

        Args:
            experts: The experts by name.
            changed: The changed tensors by expert.
            budget: Bytes for the files of all experts and of the shared part.
            metadata: The metadata of a file, for its size.
            on_step: Called with the current step and the name of a tensor.

        Returns:
            The choice for every tensor by expert, and for the shared part.

        Raises:
            InputError: If the budget is too small.
        """
        purse = budget - sum(header_bytes(metadata(name)) for name in experts)
        modes: dict[str, list[Mode]] = {}
        energies = dict.fromkeys(experts, 0.0)
        specs = {(name, each.name): each for name, several in changed.items() for each in several}
        for tensor in dict.fromkeys(each.name for several in changed.values() for each in several):
            on_step("encoding", tensor)
            owners = [name for name in experts if (name, tensor) in specs]
            fixed = [name for name in owners if not specs[name, tensor].coded]
            whole = {name: [_store_whole(tensor, specs[name, tensor].spec)] for name in fixed}
            moving = [name for name in owners if name not in fixed]
            plain = {}
            for name in moving:
                energy, plain[name] = self._list_ways(name, tensor, experts[name], specs[name, tensor].spec)
                energies[name] += energy
            modes[tensor] = [Mode(plain | whole)]
            if SHARED in self.codes and self.shared is None and len(moving) > 1:
                modes[tensor] += self._try_shared(tensor, {name: experts[name] for name in moving}, modes[tensor][0])
        needed = sum(min(curve).nbytes for each in modes.values() for curve in each[0].curves.values())
        if needed > purse:
            least = needed + budget - purse
            raise InputError(f"a budget of {budget:,} bytes is too small: headers and new tensors need {least:,}")
        scaled = {tensor: [_normalize_errors(mode, energies) for mode in several] for tensor, several in modes.items()}
        chosen = choose_modes(scaled, purse - header_bytes({}))
        spent = sum(mode.shared.nbytes for mode in chosen.values())
        places = [(name, tensor) for tensor, mode in chosen.items() for name in mode.curves]
        curves = [chosen[tensor].curves[name] for name, tensor in places]
        picked = choose(curves, purse - (spent + header_bytes({}) if spent else 0))
        plans: dict[str, CodePlan] = {name: {} for name in experts}
        for (name, tensor), option in zip(places, picked, strict=True):
            plans[name][tensor] = option.name
        return plans, {tensor: mode.shared.name for tensor, mode in chosen.items() if mode.shared.name}

    def encode(self, name: str, tensor: str, delta: Tensor, choice: TensorChoice) -> tuple[Coded, Tensor]:
        """Encode a tensor of an expert as chosen.

        Returns:
            The coded tensor, and the lost part of the change.
        """
        assert choice.code is not None
        whole = self._weigh_change(name, tensor, delta)
        target = (
            self._weigh_change(name, tensor, delta - self._read_common(tensor, delta)) if choice.residual else whole
        )
        coded = encode(target, choice.code, whole.energy)
        found = dense(decode(coded.blob, delta.shape, tensor)).view(delta.shape)
        return coded, (delta - self._read_common(tensor, delta) if choice.residual else delta) - found

    def encode_mean(self, tensor: str, experts: Iterable[Checkpoint], choice: TensorChoice) -> Coded:
        """Encode the mean change of the experts that change a tensor."""
        assert choice.code is not None
        return encode(Delta(self._average_change(tensor, experts)[0]), choice.code)

    def _list_ways(self, name: str, tensor: str, expert: Checkpoint, spec: TensorSpec) -> tuple[float, list[Option]]:
        """Return the energy of a change and all ways to store it."""
        delta = task_matrix(self.base, expert, tensor)
        change = self._weigh_change(name, tensor, delta)
        options = [
            Option(_bound_dropped(tensor), change.energy, "drop"),
            _store_whole(tensor, spec),
            *self._try_codes(tensor, change),
        ]
        if self.shared is not None and tensor in self.shared.heads and SHARED in self.codes:
            rest = self._weigh_change(name, tensor, delta - self._read_common(tensor, delta))
            options += self._try_codes(tensor, rest, residual=True)
        return change.energy, options

    def _try_codes(self, tensor: str, change: Delta, residual: bool = False) -> Iterator[Option]:
        for code in candidates(change, self.codes):
            coded = encode(change, code)
            size = coded.nbytes + _bound_entry(f"{tensor}::{'residual' if residual else 'code'}", "U8", (coded.nbytes,))
            yield Option(size, coded.error, str(TensorChoice(code, residual)))

    def _try_shared(self, tensor: str, experts: Mapping[str, Checkpoint], plain: Mode) -> list[Mode]:
        """Return the modes that store the mean change of a tensor once, if that can pay.

        With ρ = ‖mean‖² / mean ‖Δ_t‖², the residual of an expert needs ½ log₂ 1/(1 − ρ) bits less per entry. The mean,
        at about two bits, must cost less than that for all experts.
        """
        mean, energy = self._average_change(tensor, experts.values())
        change = Delta(mean)
        share = change.energy / energy if energy else 0.0
        if share < 1 and 0.5 * math.log2(1 / (1 - share)) <= 2 / len(experts):
            return []
        good = [each for each in self._try_codes(tensor, change) if each.error <= _SHARED_ERROR * change.energy]
        if not good:
            return []
        best = min(good)
        code = TensorChoice.parse(best.name).code
        assert code is not None
        common = dense(decode(encode(change, code).blob, mean.shape, tensor)).view(mean.shape)
        curves = dict(plain.curves)
        for name, expert in experts.items():
            rest = self._weigh_change(name, tensor, task_matrix(self.base, expert, tensor) - common)
            curves[name] = [*curves[name], *self._try_codes(tensor, rest, residual=True)]
        return [Mode(curves, best._replace(error=0.0))]

    def _average_change(self, tensor: str, experts: Iterable[Checkpoint]) -> tuple[Tensor, float]:
        """Return the mean change of the experts that change a tensor, and the mean of their energies."""
        total, energy, count = None, 0.0, 0
        for expert in experts:
            if tensor not in expert or not is_change(self.base, tensor, expert.spec(tensor)):
                continue
            delta = task_matrix(self.base, expert, tensor)
            if own := float(delta.double().square().sum()):
                total = delta.double() if total is None else total.add_(delta)
                energy, count = energy + own, count + 1
        assert total is not None, "some expert changes the tensor"
        return (total / count).float(), energy / count

    def _read_common(self, tensor: str, like: Tensor) -> Tensor:
        assert self.shared is not None
        return self.shared.change(tensor).view(like.shape)

    def _weigh_change(self, name: str, tensor: str, delta: Tensor) -> Delta:
        try:
            return Delta(delta, self.grams.get(name, {}).get(tensor), self.randomized)
        except InputError as error:
            raise InputError(f"{name}: {tensor!r}: {error}") from None


def header_bytes(metadata: Mapping[str, str]) -> int:
    """Return the maximum size of a file without tensors."""
    noted = {**metadata, "dropped": "{}"}
    return 8 + len(json.dumps({"__metadata__": noted}, separators=(",", ":"))) + 8


def _bound_entry(key: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the maximum size of a tensor's entry in the header of a file."""
    described = {"dtype": dtype, "shape": list(shape), "data_offsets": [_LARGEST] * 2}
    return len(json.dumps({key: described}, separators=(",", ":"))) - 1


def _bound_dropped(tensor: str) -> int:
    """Return the maximum size of a dropped tensor in the metadata."""
    return len(json.dumps(note_dropped({tensor: -1.2345e-300})))


def note_dropped(energies: Mapping[str, float]) -> str:
    """Return the energies of dropped tensors as text for the metadata of a file."""
    return json.dumps({tensor: float(f"{energy:.4g}") for tensor, energy in energies.items()})


def _store_whole(tensor: str, spec: TensorSpec) -> Option:
    return Option(spec.nbytes + _bound_entry(f"{tensor}::full", CODES[spec.element.name], spec.shape), 0.0, "full")


def _normalize_errors(mode: Mode, energies: Mapping[str, float]) -> Mode:
    """Return a mode with errors as shares of the experts' energies."""
    return replace(
        mode,
        curves={
            name: [option._replace(error=option.error / (energies[name] or 1.0)) for option in curve]
            for name, curve in mode.curves.items()
        },
    )
