"""Flower strategies that align clients before they aggregate them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from merganser.align.symmetries import Symmetry
from merganser.errors import require
from merganser.federated.aggregation import AggregationMethod, align_clients


def aligned(strategy: Any, symmetry: Symmetry, *, method: AggregationMethod = "universe") -> Any:
    """Wrap a Flower strategy so that it aggregates aligned clients.

    Sampling, weighting by examples, metrics and the server optimiser stay those of the strategy. Clients send state
    dicts with the names that the symmetry was derived for; the reference is the global model at the start of the
    round. Clients that start a round from the same weights and train briefly stay aligned by themselves: alignment
    matters when they train long or bring models of their own.

    Args:
        strategy: A message-based strategy (`flwr.serverapp.strategy`): FedAvg, FedProx, FedAdam or your own.
        symmetry: The symmetry of the architecture, from `mg.align.symmetry`.
        method: How to align the clients; see `align_clients`.

    Returns:
        A Flower strategy.

    Example:
        >>> from flwr.serverapp.strategy import FedAvg  # doctest: +SKIP
        >>> strategy = mg.federated.aligned(FedAvg(), mg.align.symmetry(base, images))  # doctest: +SKIP
    """
    base = require("flwr.serverapp.strategy", "federated").Strategy
    return type("Aligned", (_Aligned, base), {})(strategy, symmetry, method)


class _Aligned:
    """The methods to override in Flower's `Strategy`, whose class exists only if Flower is installed."""

    def __init__(self, strategy: Any, symmetry: Symmetry, method: AggregationMethod) -> None:
        self.strategy = strategy
        self.symmetry = symmetry
        self.method = method
        self._reference: Any = None

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self._reference = arrays
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
        replies = list(replies)
        sent = [
            (reply.content, key, record)
            for reply in replies
            if not reply.has_error()
            for key, record in reply.content.array_records.items()
        ]
        if sent:
            reference = None if self._reference is None else self._reference.to_torch_state_dict()
            clients = [record.to_torch_state_dict() for _, _, record in sent]
            moved = align_clients(clients, self.symmetry, reference, method=self.method)
            for (content, key, record), state in zip(sent, moved, strict=True):
                content[key] = type(record)(state)
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()
