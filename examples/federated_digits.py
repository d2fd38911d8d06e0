"""Compare federated averaging of ten clients, plain and with the clients aligned first.

Each client has trained a network from its own initialisation on its own digits, with few examples of some. Clients
send these networks in the first round, and continue from the global model in later rounds. With Flower installed
(`federated` extra), the rounds run in its simulation, otherwise in a plain loop with the same aggregation. Needs
scikit-learn for its digits.

    python examples/federated_digits.py --rounds 3
"""

import argparse
from collections.abc import Mapping
from importlib.util import find_spec

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import merganser as mg
from merganser import federated

CLIENTS = 10
TRAIN = 1400
State = Mapping[str, Tensor]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def load() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def share(labels: Tensor) -> list[Tensor]:
    """The rows of each client; the classes of a client follow a Dirichlet distribution, so that they differ."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    taste = torch.distributions.Dirichlet(torch.full((CLIENTS,), 1.0)).sample((10,))
    owners = torch.multinomial(taste[labels[:TRAIN]], 1, generator=generator).squeeze(1)
    return [torch.where(owners == client)[0] for client in range(CLIENTS)]


IMAGES, LABELS = load()
SHARES = share(LABELS)


def train(client: int, state: State | None, steps: int = 80) -> tuple[dict[str, Tensor], int]:
    """A client's round: from the global model, or from its own initialisation. Returns weights and examples."""
    images, labels = IMAGES[SHARES[client]], LABELS[SHARES[client]]
    module = network(seed=client + 1)
    if state is not None:
        module.load_state_dict(dict(state))
    optimiser = torch.optim.AdamW(module.parameters(), 2e-3)
    generator = torch.Generator().manual_seed(client)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,), generator=generator)
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(images[batch]), labels[batch]).backward()
        optimiser.step()
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}, len(images)


def accuracy(state: State) -> float:
    module = network()
    module.load_state_dict(dict(state))
    with torch.inference_mode():
        return float((module(IMAGES[TRAIN:]).argmax(1) == LABELS[TRAIN:]).float().mean())


def plain_loop(rounds: int, align: bool) -> list[float]:
    symmetry = mg.align.symmetry(network(), torch.zeros(2, 64))
    model, scores = None, []
    for _ in range(rounds):
        states, examples = zip(*(train(client, model) for client in range(CLIENTS)), strict=True)
        if align:
            model = federated.aggregate(states, examples, symmetry, reference=model)
        else:
            model = mg.merge({f"client {i}": state for i, state in enumerate(states)}, weight=list(examples))
        scores.append(accuracy(model))
    return scores


def in_flower(rounds: int, align: bool) -> list[float]:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()
    scores: list[float] = []

    @client_app.train()
    def train_client(message: Message, context: Context) -> Message:
        first = message.content["config"]["server-round"] == 1
        start = None if first else message.content["arrays"].to_torch_state_dict()
        state, examples = train(int(context.node_config["partition-id"]), start)
        metrics = MetricRecord({"num-examples": examples})
        return Message(content=RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
        if align:
            strategy = federated.aligned(strategy, mg.align.symmetry(network(), torch.zeros(2, 64)))

        def score(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            found = accuracy(arrays.to_torch_state_dict())
            if server_round:
                scores.append(found)
            return MetricRecord({"accuracy": found})

        strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds, evaluate_fn=score)

    run_simulation(server_app, client_app, num_supernodes=CLIENTS)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    flower = find_spec("flwr") is not None
    run = in_flower if flower else plain_loop
    print("in Flower's simulation" if flower else "in a plain loop (Flower is not installed)")
    alone = [accuracy(train(client, None)[0]) for client in range(CLIENTS)]
    print(f"clients alone  {min(alone):.3f} to {max(alone):.3f}")
    for name, align in (("FedAvg", False), ("aligned", True)):
        scores = run(rounds, align)
        print(f"{name:<14} " + "  ".join(f"round {i} {score:.3f}" for i, score in enumerate(scores, 1)))


if __name__ == "__main__":
    main()
