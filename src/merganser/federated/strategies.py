"""Any Flower strategy, with clients aligned before it aggregates them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from merganser.align.symmetries import Symmetry
from merganser.errors import require
from merganser.federated.aggregation import Method, align_clients


def aligned(strategy: Any, symmetry: Symmetry, *, method: Method = "universe") -> Any:
    """A Flower strategy that does what `strategy` does, on clients' models brought into one space.

        strategy = aligned(FedAvg(fraction_train=0.5), symmetry)
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=3)

    `strategy` is a message-based one (`flwr.serverapp.strategy`): FedAvg, FedProx, FedAdam, or your own. Its sampling,
    weighting by examples, metrics and server optimiser are its own. Clients send state dicts with the names that
    the `symmetry` was derived for; the reference is the global model the round began with.

    Clients that start a round from the same weights and train briefly stay aligned by themselves; it matters when
    they train long, or bring models of their own.
    """
    base = require("flwr.serverapp.strategy", "federated").Strategy
    return type("Aligned", (_Aligned, base), {})(strategy, symmetry, method)


class _Aligned:
    """What is put before Flower's `Strategy`, which is not known before it is imported."""

    def __init__(self, strategy: Any, symmetry: Symmetry, method: Method) -> None:
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
