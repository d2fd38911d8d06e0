"""One round's clients in one space, and their average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from merganser.align.baselines import match_to_reference
from merganser.align.permutations import apply
from merganser.align.state import Model, State, average, state_of
from merganser.align.symmetries import Symmetry
from merganser.align.universes import universe
from merganser.errors import InputError, one_of

Method = Literal["universe", "reference"]


def align_clients(
    clients: Sequence[Model], symmetry: Symmetry, reference: Model | None = None, *, method: Method = "universe"
) -> list[State]:
    """Every client's model, its units in the order of the `reference` (the global model of the round before).

    "universe" matches all clients and the reference jointly (C²M³) and maps them into the reference's space, so that
    what a server remembers of it (momentum) stays true. "reference" matches each client to the reference alone:
    cheaper, and blind to what the clients have in common. Without a reference the first client takes its place. Weights
    are moved and never changed, so each model computes what it did.
    """
    one_of("way to align clients", method, Method)
    models = list(clients) if reference is None else [reference, *clients]
    if len(models) < 2:
        return [state_of(model) for model in clients]
    found = universe(models, symmetry) if method == "universe" else match_to_reference(models, symmetry)
    first = len(models) - len(clients)
    return [apply(symmetry, found.pairwise(0, i), found.models[i]) for i in range(first, len(models))]


def aggregate(
    clients: Sequence[Model],
    examples: Sequence[float],
    symmetry: Symmetry,
    reference: Model | None = None,
    *,
    method: Method = "universe",
) -> State:
    """The next global model: Σ nᵢ πᵢ(θᵢ) / Σ nᵢ, with nᵢ the number of examples of client i and πᵢ its alignment."""
    if not clients:
        raise InputError("no client has sent a model")
    return average(align_clients(clients, symmetry, reference, method=method), examples)
