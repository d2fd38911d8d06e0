"""Alternating tuning and merging against task arithmetic, with the same number of updates for every task.

    python -m benchmarks.atm [--seeds 0 1 2 3 4] [--quick] [--json FILE]

A minute of one core. A small network learns four views of handwritten digits (upright, flipped, turned, inverted),
each a task with the same ten classes and 900 training images; 297 held-out images choose α, 600 test. Every task gets
ten epochs of mini-batches: in one run from the base, whose ends are merged by task arithmetic (α by the held-out
images), or in rounds of ATM, which merge by the mean after each. PA-ATM tunes on the held-out images alone, as many
updates. A network trained jointly, with all the updates, is the reference.

Stored in `results`:

- `rows`: by `method`, `accuracies`: mean test accuracy over the tasks, one for each seed; `alphas` where chosen;
- `cosines`: mean over seeds and tasks of cos(τ_1, τ_k) by epoch k; `first_share`: the first epoch's share of the path;
- `plane`: for the first seed, the paths of the experts, ATM and joint training in one plane (`points` by path), and the
  variance `explained` by its two axes.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.records import record
from merganser.analysis.trajectory import linear_regime, project
from merganser.digits import Digits
from merganser.errors import require
from merganser.evaluate.search import scaled
from merganser.modules.functional import combine
from merganser.tuning.atm import atm

EPOCHS, TRAIN, HELD_OUT, BATCH, RATE = 10, 900, 297, 50, 0.05
ALPHAS = (0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)

State = dict[str, Tensor]
Images = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Views:
    """The four tasks of one seed, and the base: a network that has seen 300 images of every task."""

    network: nn.Module
    train: Mapping[str, Images]
    held_out: Mapping[str, Images]
    test: Mapping[str, Images]
    generator: torch.Generator

    @classmethod
    def of(cls, seed: int) -> Views:
        pixels, labels = require("sklearn.datasets", "demo").load_digits(return_X_y=True)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(pixels), generator=generator)
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8)[order] / 16
        classes = torch.tensor(labels)[order]
        parts: list[dict[str, Images]] = []
        for part in (slice(TRAIN), slice(TRAIN, TRAIN + HELD_OUT), slice(TRAIN + HELD_OUT, None)):
            parts.append({name: (view(images[part]), classes[part]) for name, view in Digits.tasks.items()})
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        few = [(x[:300], y[:300]) for x, y in parts[0].values()]
        start = tune(network, network.state_dict(), joined(few), 60, generator)
        network.load_state_dict(start)
        return cls(network, parts[0], parts[1], parts[2], generator)

    @property
    def base(self) -> State:
        return {name: value.clone() for name, value in self.network.state_dict().items()}

    def step(self, images: Images, weights: Mapping[str, Tensor], epochs: int) -> State:
        """So many epochs on a task, counted in updates on as many images as the training set has."""
        return tune(self.network, weights, images, epochs * TRAIN // BATCH, self.generator)

    def accuracy(self, weights: Mapping[str, Tensor], part: Mapping[str, Images]) -> float:
        """The mean accuracy over the tasks."""
        with torch.no_grad():
            shares = [
                (functional_call(self.network, dict(weights), x).argmax(1) == y).double().mean()
                for x, y in part.values()
            ]
        return float(torch.stack(shares).mean())


def joined(parts: Sequence[Images]) -> Images:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def tune(
    network: nn.Module, weights: Mapping[str, Tensor], images: Images, updates: int, generator: torch.Generator
) -> State:
    """So many updates of gradient descent with momentum, on images that the generator draws."""
    model = copy.deepcopy(network)
    model.load_state_dict(dict(weights))
    optimiser = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    for _ in range(updates):
        batch = torch.randint(len(images[0]), (BATCH,), generator=generator)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(images[0][batch]), images[1][batch]).backward()
        optimiser.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def paths(views: Views, parts: Mapping[str, Images]) -> dict[str, list[State]]:
    """The weights of every task from the base, epoch by epoch."""
    found = {}
    for name, images in parts.items():
        run = [views.base]
        for _ in range(EPOCHS):
            run.append(views.step(images, run[-1], 1))
        found[name] = run
    return found


def task_arithmetic(views: Views, experts: Sequence[State]) -> tuple[State, float]:
    """The sum of task vectors at the best α on the held-out images."""
    vector = combine([*experts, views.base], [*([1.0] * len(experts)), -float(len(experts))])
    scores = {alpha: views.accuracy(scaled(views.base, vector, alpha), views.held_out) for alpha in ALPHAS}
    alpha = max(scores, key=lambda each: scores[each])
    return scaled(views.base, vector, alpha), alpha


def measure(views: Views, epochs_per_round: Sequence[int]) -> tuple[dict[str, State], dict[str, float], dict[str, Any]]:
    """The final weights of every method, α where one was chosen, and the paths."""
    runs = paths(views, views.train)
    found, alphas = {"base": views.base}, {}
    for name, epoch in (("task arithmetic, one epoch", 1), ("task arithmetic", EPOCHS)):
        found[name], alphas[name] = task_arithmetic(views, [run[epoch] for run in runs.values()])
    steps = {name: partial(views.step, images) for name, images in views.train.items()}
    for epochs in epochs_per_round:
        name = f"ATM, {EPOCHS // epochs} rounds of {epochs}"
        found[name] = atm(views.base, steps, budget=EPOCHS, epochs_per_round=epochs).weights
    held_out = {name: partial(views.step, images) for name, images in views.held_out.items()}
    found[f"PA-ATM, {EPOCHS} rounds of 1"] = atm(views.base, held_out, budget=EPOCHS).weights
    together = joined(list(views.train.values()))
    joint = paths(views, {"joint training": together})["joint training"]
    found["joint training"] = views.step(together, views.base, EPOCHS * len(runs))
    return found, alphas, {"experts": runs, "joint training": joint}


def plane(views: Views, runs: Mapping[str, Sequence[State]], joint: Sequence[State]) -> dict[str, Any]:
    """The paths in one plane."""
    steps = {name: partial(views.step, images) for name, images in views.train.items()}
    rounds = [views.base]
    for _ in range(EPOCHS):
        rounds.append(atm(rounds[-1], steps, budget=1).weights)
    found = project({**runs, "ATM": rounds, "joint training": joint})
    return {"points": found.points, "explained": found.explained}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    seeds, epochs_per_round = (options.seeds[:1], (1,)) if options.quick else (options.seeds, (1, 2, 5))
    rows: dict[str, dict[str, Any]] = {}
    cosines, shares = [], []
    results: dict[str, Any] = {}
    for seed in seeds:
        views = Views.of(seed)
        found, alphas, runs = measure(views, epochs_per_round)
        for name, weights in found.items():
            row = rows.setdefault(name, {"method": name, "accuracies": [], "alphas": []})
            row["accuracies"].append(views.accuracy(weights, views.test))
            row["alphas"] += [alphas[name]] if name in alphas else []
            print(f"seed {seed}, {name:<28} {row['accuracies'][-1]:.4f}", flush=True)
        judged = linear_regime(runs["experts"]).runs.values()
        cosines += [run.cosines for run in judged]
        shares += [run.shares[0] for run in judged]
        results.setdefault("plane", plane(views, runs["experts"], runs["joint training"]))
    results["rows"] = list(rows.values())
    results["cosines"] = [sum(each) / len(each) for each in zip(*cosines, strict=True)]
    results["first_share"] = sum(shares) / len(shares)
    record(options.json, results, seeds)


if __name__ == "__main__":
    main()
