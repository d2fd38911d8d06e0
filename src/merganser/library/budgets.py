"""What the experts of a library keep at smaller budgets, and the ranks they are stored with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from merganser.checkpoints.dtypes import dtype_of
from merganser.checkpoints.tensor_names import natural_order
from merganser.kernels.arrays import AnyArray
from merganser.library.ranks import Changed, RankPolicy, allot
from merganser.library.reporting import layer_of
from merganser.library.storage import FACTOR_DTYPES, header_room

if TYPE_CHECKING:
    from merganser.library.expert_file import ExpertFile
    from merganser.library.library import Library


#: Budgets at which the loss of a library is predicted.
STEPS = 25


def ranks_by_layer(library: Library) -> dict[str, dict[str, float]]:
    """Return the mean rank of the stored factors in every layer.

    Args:
        library: The library.

    Returns:
        By expert and layer, in natural order; layers without factors are left out.
    """
    found: dict[str, dict[str, float]] = {}
    for name in library.experts:
        file = library.expert(name).file
        ranks: dict[str, list[int]] = {}
        for tensor, kind in file.kinds.items():
            if kind == "factors":
                ranks.setdefault(layer_of(tensor), []).append(file.rank(tensor))
        found[name] = {layer: float(np.mean(ranks[layer])) for layer in sorted(ranks, key=natural_order)}
    return found


def predict_budgets(library: Library) -> list[dict[str, Any]]:
    """Return, for budgets up to the library's own size, the energy that each expert would keep.

    The energy is the share of ‖Δ‖² of a task vector Δ that is kept if the components in the library are cut to this
    budget. A new build from the experts themselves keeps at least that with plain factors, and about that or more with
    codes. For a library in codes the list is empty, since a smaller budget may choose quite different codes.
    """
    if library.manifest.policy.codes:
        return []
    changed: dict[str, list[Changed]] = {}
    whole: dict[str, float] = {}
    for name in library.experts:
        expert = library.expert(name)
        file = expert.file
        changed[name] = [
            Changed(tensor, expert.spec(tensor), kind == "factors", _read_squares(file, tensor, kind))
            for tensor, kind in file.kinds.items()
            if tensor in library.base
        ]
        kept_whole = [tensor for tensor, kind in file.kinds.items() if kind == "full" and expert.merges(tensor)]
        differences = (file.full(tensor).double() - library.base.read(tensor).double() for tensor in kept_whole)
        whole[name] = sum(float(each.square().sum()) for each in differences)
    known = library.manifest.base_fingerprint
    rooms = {
        name: header_room([(c.name, c.spec) for c in each], {"expert": name, "base": known})
        for name, each in changed.items()
    }
    fixed = sum(rooms.values()) + sum(c.spec.nbytes for each in changed.values() for c in each if not c.matrix)
    largest = max(sum(library.size().experts.values()), fixed)
    found = []
    for step in range(STEPS):
        budget = int(fixed + (largest - fixed) * (step / (STEPS - 1)) ** 2)
        slots = allot(RankPolicy("budget", budget), changed, dtype_of(library.manifest.dtype, FACTOR_DTYPES), rooms)
        energy = {}
        for name, each in changed.items():
            ranks = {slot.name: slot.rank for slot in slots[name]}
            pairs = [(c.squares, ranks[c.name]) for c in each if c.squares is not None]
            total = whole[name] + sum(float(squares.sum()) for squares, _ in pairs)
            kept = whole[name] + sum(float(squares[:rank].sum()) for squares, rank in pairs)
            share = kept / total if total else 1.0
            energy[name] = share * library.manifest.experts[name].energy
        found.append({"bytes": budget, "energy": energy})
    return found


def _read_squares(file: ExpertFile, tensor: str, kind: str) -> AnyArray | None:
    """Return the stored σ² of a task matrix, with zeros for components that are not stored."""
    if kind != "factors":
        return None
    values = file.factors(tensor).s.square().numpy()
    return np.pad(values, (0, min(file.spec(tensor).shape) - len(values)))
