"""Ten clients with small CNNs, each with its own share of CIFAR-10: FedAvg, plain and with clients aligned first.

Clients begin the first round from the same initialisation or each from its own, and every later round from the global
model. The images are halved to 16 × 16 pixels and few, so that all of it runs in minutes on one thread; accuracies are
accordingly low, and only differences between the ways to average mean something.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.single_task import loaded
from benchmarks.zoo.architectures import CNN
from benchmarks.zoo.images import Split
from merganser import align
from merganser import federated as fed
from merganser.align.state import State, average, state_of
from merganser.federated.aggregation import AggregationMethod

CLIENTS = 10
BATCH = 32
RATE = 2e-3
WAYS: dict[str, AggregationMethod | None] = {
    "FedAvg": None,
    "aligned to the global model": "reference",
    "aligned in a universe": "universe",
}
STARTS = ("same", "different")


@dataclass(frozen=True)
class Federation:
    """Small images; the rows of each client, whose classes follow a Dirichlet distribution, and the held-out ones."""

    images: Tensor
    labels: Tensor
    shares: list[Tensor]
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def drawn(cls, train: Split, test: Split, seed: int) -> Federation:
        """Deal the training images to the clients."""
        generator = torch.Generator().manual_seed(seed)
        # Exponential draws, normalised, are a Dirichlet distribution of concentration one.
        taste = -torch.rand(10, CLIENTS, generator=generator).log()
        owners = torch.multinomial(taste[train.labels], 1, generator=generator).squeeze(1)
        shares = [torch.where(owners == client)[0] for client in range(CLIENTS)]
        return cls(_halved(train), train.labels, shares, _halved(test), test.labels)

    @torch.no_grad()
    def accuracy(self, state: State) -> float:
        """Return the share of held-out images that a model classifies correctly."""
        module = loaded(network(0), state)
        return float((module(self.test_images).argmax(1) == self.test_labels).float().mean())

    def train(self, client: int, start: State, epochs: int, seed: int) -> State:
        """Train a client's model on its own images, from the global model or its own initialisation."""
        rows = self.shares[client]
        module = loaded(network(0), start).train()
        optimiser = torch.optim.AdamW(module.parameters(), RATE, fused=True)
        generator = torch.Generator().manual_seed(1000 * seed + client)
        for _ in range(epochs):
            for batch in rows[torch.randperm(len(rows), generator=generator)].split(BATCH):
                optimiser.zero_grad()
                F.cross_entropy(module(self.images[batch]), self.labels[batch]).backward()
                optimiser.step()
        return state_of(module)

    def clients(self, starts: Sequence[State], epochs: int, seed: int) -> list[State]:
        """Train every client from its start."""
        return [self.train(client, start, epochs, seed) for client, start in enumerate(starts)]

    def rounds(self, first: list[State], epochs: int, seed: int, count: int) -> dict[str, list[float]]:
        """Return the accuracy of the global model after every round, by way to average; all share the first clients."""
        symmetry = align.symmetry(network(0), torch.zeros(2, 3, 16, 16))
        examples = [len(share) for share in self.shares]
        clients = dict.fromkeys(WAYS, first)
        models: dict[str, State] = {}
        scores: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(1, count + 1):
            for way, method in WAYS.items():
                if method is None:
                    models[way] = average(clients[way], examples)
                else:
                    models[way] = fed.aggregate(clients[way], examples, symmetry, models.get(way), method=method)
                scores[way].append(self.accuracy(models[way]))
            if turn == count:
                break
            for place, way in enumerate(WAYS):
                # Ways with the same model have the same clients; those of one initialisation often do.
                twin = next((other for other in list(WAYS)[:place] if _equal(models[other], models[way])), None)
                starts = [models[way]] * CLIENTS
                clients[way] = clients[twin] if twin else self.clients(starts, epochs, seed + 100 * turn)
        return scores


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return CNN(inputs=3, channels=(16, 32, 32)).eval()


def _halved(split: Split) -> Tensor:
    return F.avg_pool2d(split.normalise(split.images), 2).contiguous()


def _equal(first: State, second: State) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def table(
    train: Split, test: Split, repeats: int, epochs: Sequence[int] = (1, 5, 20), rounds: int = 3
) -> dict[str, list[list[float]]]:
    """Return the accuracy of the global model by repeat (data, initialisations and batches of a seed) and round.

    One entry for each kind of start, number of local epochs and way to average; for clients alone, the mean of theirs
    after the first round.
    """
    found: dict[str, list[list[float]]] = {}
    for seed in range(repeats):
        drawn = Federation.drawn(train, test, seed)
        own = [state_of(network(1000 * (seed + 1) + client)) for client in range(CLIENTS)]
        for start in STARTS:
            for local in epochs:
                first = drawn.clients(own if start == "different" else own[:1] * CLIENTS, local, seed)
                alone = statistics.mean(drawn.accuracy(state) for state in first)
                ways = {"clients alone": [alone]} | drawn.rounds(first, local, seed, rounds)
                for way, scores in ways.items():
                    found.setdefault(f"{start}: {local}: {way}", []).append(scores)
                    shown = " ".join(f"{score:.3f}" for score in scores)
                    print(f"repeat {seed}, {start}, {local} epochs, {way}: {shown}", flush=True)
    return found
