"""Ten clients, each with its own initialisation and its own share of the digits: FedAvg, plain and aligned first."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from merganser import align
from merganser import federated as fed
from merganser.align.state import State, average
from merganser.errors import require

CLIENTS = 10
TRAIN = 1400
WAYS = {"FedAvg": None, "aligned to the global model": "reference", "aligned in a universe": "universe"}


@dataclass(frozen=True)
class Digits:
    """8×8 digits; the rows of each client, whose classes follow a Dirichlet distribution, and the held-out rest."""

    images: Tensor
    labels: Tensor
    shares: list[Tensor]

    @classmethod
    def drawn(cls, seed: int) -> Digits:
        datasets = require("sklearn.datasets", "benchmarks")
        pixels, targets = datasets.load_digits(return_X_y=True)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(pixels), generator=generator)
        images, labels = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(targets)[order]
        # Exponential draws, normalised, are a Dirichlet distribution of concentration one.
        taste = -torch.rand(10, CLIENTS, generator=generator).log()
        owners = torch.multinomial(taste[labels[:TRAIN]], 1, generator=generator).squeeze(1)
        return cls(images, labels, [torch.where(owners == client)[0] for client in range(CLIENTS)])


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def train(digits: Digits, client: int, start: State | None, seed: int, steps: int) -> State:
    """A client's round: on from the global model, or from its own initialisation in the first round."""
    images, labels = digits.images[digits.shares[client]], digits.labels[digits.shares[client]]
    module = network(1000 * seed + client)
    if start is not None:
        module.load_state_dict(start)
    optimiser = torch.optim.AdamW(module.parameters(), 2e-3)
    generator = torch.Generator().manual_seed(1000 * seed + client)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,), generator=generator)
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(images[batch]), labels[batch]).backward()
        optimiser.step()
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


@torch.no_grad()
def accuracy(digits: Digits, state: State) -> float:
    module = network(0)
    module.load_state_dict(state)
    return float((module(digits.images[TRAIN:]).argmax(1) == digits.labels[TRAIN:]).float().mean())


def rounds(digits: Digits, method: Any, count: int, seed: int, steps: int) -> list[float]:
    """Test accuracy of the global model after every round."""
    symmetry = align.symmetry(network(0), torch.zeros(2, 64))
    examples = [len(share) for share in digits.shares]
    model: State | None = None
    scores = []
    for _ in range(count):
        states = [train(digits, client, model, seed, steps) for client in range(CLIENTS)]
        if method is None:
            model = average(states, examples)
        else:
            model = fed.aggregate(states, examples, symmetry, model, method=method)
        scores.append(accuracy(digits, model))
    return scores


def table(seeds: Sequence[int], count: int = 4, steps: int = 80) -> dict[str, dict[str, float]]:
    """Mean accuracy by round over seeds (data, initialisations and batches), and the deviation in the last."""
    rows: dict[str, dict[str, float]] = {}
    drawn = {seed: Digits.drawn(seed) for seed in seeds}
    alone = [accuracy(d, train(d, c, None, seed, steps)) for seed, d in drawn.items() for c in range(CLIENTS)]
    rows["clients alone"] = {"round_1": statistics.mean(alone)}
    for name, method in WAYS.items():
        runs = [rounds(digits, method, count, seed, steps) for seed, digits in drawn.items()]
        rows[name] = {f"round_{i}": statistics.mean(run[i - 1] for run in runs) for i in range(1, count + 1)}
        rows[name]["spread"] = statistics.pstdev(run[-1] for run in runs)
    return rows
