"""Report size and error by tensor and by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.checkpoints.tensor_names import natural_order
from merganser.library.codes.catalogue import CODES

if TYPE_CHECKING:
    from merganser.library.expert_file import ExpertFile
    from merganser.library.library import Library

_NAMES = {code.number: code.name for code in CODES.values()}


@dataclass(frozen=True)
class TensorReport:
    """How one tensor of an expert is stored.

    `error` and `energy` are squares, ‖Δ − stored Δ‖² and ‖Δ‖², weighted if the library was built with Gram matrices;
    None if unknown, as in a library of plain factors.
    """

    expert: str
    tensor: str
    code: str
    nbytes: int
    entries: int
    error: float | None
    energy: float | None

    @property
    def lost(self) -> float | None:
        """Return ‖Δ − stored Δ‖² / ‖Δ‖², None if unknown."""
        return self.error / self.energy if self.energy and self.error is not None else None

    @property
    def bits(self) -> float:
        """Return the bits per entry."""
        return 8 * self.nbytes / max(1, self.entries)


@dataclass(frozen=True)
class LayerReport:
    """The size of one layer over the experts together; `lost` is Σ‖Δ − stored Δ‖² / Σ‖Δ‖², None if unknown."""

    layer: str
    codes: dict[str, int]
    nbytes: int
    bits: float
    lost: float | None


def describe_stored_tensors(library: Library, name: str) -> list[TensorReport]:
    """Return how every changed tensor of an expert is stored.

    Args:
        library: The library.
        name: The expert.

    Returns:
        One record per tensor in the expert's order, including dropped ones.
    """
    expert = library.expert(name)
    file = expert.file
    found = []
    for tensor, kind in file.kinds.items():
        error, energy = None, None
        if tensor in file.heads:
            error, energy = file.heads[tensor].error, file.heads[tensor].energy
        elif kind == "full":
            error = 0.0
            if expert.merges(tensor):
                energy = float(expert.delta(tensor).double().square().sum())
        code = _name_code(file, tensor)
        found.append(TensorReport(name, tensor, code, file.nbytes(tensor), expert.spec(tensor).numel, error, energy))
    for tensor, energy in file.dropped.items():
        entries = expert.spec(tensor).numel if tensor in expert else 0
        found.append(TensorReport(name, tensor, "dropped", 0, entries, energy, energy))
    place = {tensor: index for index, tensor in enumerate(expert.names())}
    return sorted(found, key=lambda each: place.get(each.tensor, len(place)))


def sum_by_layer(tensors: Iterable[TensorReport]) -> list[LayerReport]:
    """Return the sums over layers in natural order: the numbered module a tensor belongs to, or the module itself.

    Args:
        tensors: Records of one expert or of several.
    """
    groups: dict[str, list[TensorReport]] = {}
    for each in tensors:
        groups.setdefault(layer_of(each.tensor), []).append(each)
    found = []
    for layer, group in sorted(groups.items(), key=lambda pair: natural_order(pair[0])):
        known = [(each.error, each.energy) for each in group if each.error is not None and each.energy is not None]
        energy = sum(pair[1] for pair in known)
        lost = sum(pair[0] for pair in known) / energy if energy and _knows_errors(group) else None
        nbytes, entries = sum(each.nbytes for each in group), sum(each.entries for each in group)
        codes = dict(Counter(each.code for each in group).most_common())
        found.append(LayerReport(layer, codes, nbytes, 8 * nbytes / max(1, entries), lost))
    return found


def layer_of(tensor: str) -> str:
    """Return the layer of a tensor: its name up to the last number, or without its last part.

    Args:
        tensor: The name of a tensor.

    Example:
        >>> layer_of("encoder.layer.3.output.dense.weight"), layer_of("embeddings.word.weight")
        ('encoder.layer.3', 'embeddings.word')
    """
    parts = tensor.split(".")
    numbers = [index for index, part in enumerate(parts[:-1]) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts[:-1]) or tensor


def _knows_errors(group: list[TensorReport]) -> bool:
    """Return whether the error of all changes is known; new tensors are not changes and have no energy."""
    return all(each.error is not None for each in group)


def _name_code(file: ExpertFile, tensor: str) -> str:
    if tensor in file.heads:
        name = _NAMES.get(file.heads[tensor].number, "unknown")
        return f"residual {name}" if file.is_residual(tensor) else name
    return "whole" if file.kinds[tensor] == "full" else "plain factors"
