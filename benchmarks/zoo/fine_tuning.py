"""Fine-tuning a pretrained encoder together with a fresh head: what text and image experts have in common."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.records import command
from benchmarks.zoo.cards import Card
from benchmarks.zoo.training import History, run_epochs, set_rate, triangle

#: The state of a training that is not finished, in the expert's directory.
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class FineTuning:
    """AdamW on encoder and head at one rate, which rises over `warmup` of the steps, then falls to zero.

    The head starts at N(0, `head_spread`²), so that the encoder has to move with it.
    """

    epochs: int
    rate: float
    batch: int = 32
    warmup: float = 0.1
    decay: float = 0.01
    head_spread: float = 0.02


@dataclass(frozen=True)
class Material:
    """What an expert learns from: `steps` batches of inputs and labels an epoch, and how good it is by now."""

    steps: int
    batches: Callable[[torch.Generator], Iterator[tuple[Any, Tensor]]]
    features: Callable[[Any], Tensor]
    score: Callable[[], float]


def start_head(width: int, classes: int, spread: float, seed: int) -> nn.Linear:
    """A head with weights N(0, spread²) and biases 0."""
    head = nn.Linear(width, classes)
    with torch.no_grad():
        head.weight.normal_(0, spread, generator=torch.Generator().manual_seed(seed))
        head.bias.zero_()
    return head


def fine_tune(
    name: str,
    encoder: nn.Module,
    head: nn.Linear,
    material: Material,
    schedule: FineTuning,
    seed: int,
    checkpoint: Path,
    after_first: Callable[[], None] = lambda: None,
) -> list[History]:
    """Train what of the encoder requires gradients and the head, or finish; `after_first` runs after epoch 1.

    The order of an epoch depends on (seed, epoch) only, so a resumed run equals a whole one.
    """
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(
        [*trained, *head.parameters()], schedule.rate, weight_decay=schedule.decay, fused=True
    )

    def run(epoch: int) -> History:
        losses = []
        for step, (inputs, labels) in enumerate(material.batches(torch.Generator().manual_seed(1000 * seed + epoch))):
            progress = (epoch * material.steps + step + 1) / (material.steps * schedule.epochs)
            set_rate(optimiser, schedule.rate * triangle(progress, schedule.warmup))
            loss = F.cross_entropy(head(material.features(inputs)), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        score = material.score()
        print(f"{name} seed {seed} epoch {epoch + 1}: {score:.4f}", flush=True)
        if epoch == 0:
            after_first()
        return {"loss": statistics.mean(losses), "test_accuracy": score}

    return run_epochs(checkpoint, {"encoder": encoder, "head": head, "optimiser": optimiser}, schedule.epochs, run)


def write_card(
    directory: Path,
    model: str,
    seed: int,
    data: dict[str, Any],
    schedule: FineTuning,
    steps: int,
    history: list[History],
    scores: dict[str, float],
    guards: dict[str, Any],
) -> Card:
    """Write the card of an expert that is finished, in place of its checkpoint; `steps` are those of an epoch."""
    card = Card(
        model=model,
        command=command(),
        seed=seed,
        data=data,
        epochs=schedule.epochs,
        steps=schedule.epochs * steps,
        training=asdict(schedule),
        scores=scores,
        history=history,
        seconds=sum(epoch["seconds"] for epoch in history),
        guards=guards,
    )
    card.write(directory)
    (directory / CHECKPOINT).unlink(missing_ok=True)
    return card


def guards(base: nn.Module, encoder: nn.Module, base_accuracy: float, accuracy: float) -> dict[str, Any]:
    """Return what the base keeps of the expert's accuracy, and ‖θ − θ_0‖ / ‖θ_0‖ of every matrix that moved."""
    before = base.state_dict()
    distances = {
        name: round(float((value - before[name]).norm() / before[name].norm()), 4)
        for name, value in encoder.state_dict().items()
        if value.ndim >= 2 and not torch.equal(value, before[name])
    }
    return {
        "base_share": base_accuracy / accuracy,
        "median_distance": statistics.median(distances.values()),
        "distances": distances,
    }
