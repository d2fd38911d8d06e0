"""Align the clients of one round and average them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from merganser.align.baselines import match_to_reference
from merganser.align.permutations import apply
from merganser.align.state import State, average, state_of
from merganser.align.symmetries import Symmetry
from merganser.align.universes import universe
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError, one_of

AggregationMethod = Literal["universe", "reference"]


def align_clients(
    clients: Sequence[Reference],
    symmetry: Symmetry,
    reference: Reference | None = None,
    *,
    method: AggregationMethod = "universe",
) -> list[State]:
    """Permute the units of every client's model to the order of the reference.

    The models compute the same as before.

    Args:
        clients: The clients' models.
        symmetry: The symmetry of the architecture, from `mg.align.symmetry`.
        reference: The global model of the round before; the first client by default.
        method: `"universe"` matches all clients and the reference jointly (C²M³) and maps them into the reference's
            space, so that the server's momentum stays valid. `"reference"` matches each client to the reference alone,
            which is cheaper but ignores what the clients have in common.

    Returns:
        The aligned state dicts, in the order of the clients.

    Raises:
        InputError: If the method is unknown or a model does not fit the symmetry.

    Example:
        >>> symmetry = mg.align.symmetry(base, images)
        >>> states = mg.federated.align_clients(models, symmetry, base)
    """
    one_of("way to align clients", method, AggregationMethod)
    models = list(clients) if reference is None else [reference, *clients]
    if len(models) < 2:
        return [state_of(model) for model in clients]
    found = universe(models, symmetry) if method == "universe" else match_to_reference(models, symmetry)
    first = len(models) - len(clients)
    return [apply(symmetry, found.pairwise(0, i), found.models[i]) for i in range(first, len(models))]


def aggregate(
    clients: Sequence[Reference],
    examples: Sequence[float],
    symmetry: Symmetry,
    reference: Reference | None = None,
    *,
    method: AggregationMethod = "universe",
) -> State:
    """Return the next global model Σ nᵢ πᵢ(θᵢ) / Σ nᵢ, with πᵢ the alignment of client i.

    Args:
        clients: The clients' models.
        examples: nᵢ, the number of examples of each client.
        symmetry: The symmetry of the architecture, from `mg.align.symmetry`.
        reference: The global model of the round before; the first client by default.
        method: How to align the clients; see `align_clients`.

    Returns:
        The averaged state dict.

    Raises:
        InputError: If there are no clients.

    Example:
        >>> symmetry = mg.align.symmetry(base, images)
        >>> merged = mg.federated.aggregate(models, [100, 50, 50], symmetry, base)
    """
    if not clients:
        raise InputError("no client sent a model")
    return average(align_clients(clients, symmetry, reference, method=method), examples)
