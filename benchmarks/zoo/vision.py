"""Train image classifiers that differ only in their seed: same data, same schedule, other initialisation and order.

    python -m benchmarks.zoo.vision --arch mlp --dataset mnist --seeds 0 1 2 3 4
    python -m benchmarks.zoo.vision --arch resnet20-ln --dataset cifar10 --seeds 0 1 2

On one thread of an idle 2-core server processor an MLP takes 25 s. Extrapolated there from a few steps, an epoch of
ResNet20 1× takes 55, 125 and 230–290 s at 16, 24 and 32 pixels, one of VGG16 10, 20 and 36 minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.records import command
from benchmarks.zoo.architectures import ARCHITECTURES, build
from benchmarks.zoo.cards import Card, add_locations, default_cache, read_card
from benchmarks.zoo.images import DATASETS, Split, load_images, training_batches
from benchmarks.zoo.training import Stopwatch, save_checkpoint, set_rate, triangle


@dataclass(frozen=True)
class Schedule:
    """SGD with Nesterov momentum; the rate rises linearly over `warmup` of the steps, then falls linearly to zero.

    `sides` gives each epoch's image side in pixels (None: as stored), so its length is the number of epochs. `clip`
    bounds the norm of the gradient; without it the VGG16 falls back to chance.
    """

    sides: tuple[int | None, ...]
    rate: float
    batch: int = 128
    warmup: float = 0.2
    momentum: float = 0.9
    decay: float = 5e-4
    smoothing: float = 0.0
    clip: float | None = None
    augment: bool = True


SCHEDULES = {
    "mlp": Schedule((None,) * 5, rate=0.1, decay=1e-4, augment=False),
    "resnet20-bn": Schedule((16, 16, 16, 24, 32), rate=0.2),
    "resnet20-bn-2x": Schedule((16, 16, 16, 24, 32), rate=0.2),
    "resnet20-ln": Schedule((16, 16, 16, 24, 32), rate=0.1),
    "resnet20-ln-2x": Schedule((16, 16, 16, 24, 32), rate=0.1),
    "vgg16": Schedule((*(16,) * 6, *(24,) * 2, *(32,) * 2), rate=0.02, batch=64, clip=1.0),
}


def model_directory(cache: Path, arch: str, dataset: str, seed: int) -> Path:
    return cache / "vision" / dataset / arch / f"seed{seed}"


def load_model(arch: str, dataset: str, seed: int, cache: Path | None = None) -> nn.Module:
    """A trained classifier of the zoo, in evaluation mode."""
    model = build(arch)
    model.load_state_dict(
        load_file(model_directory(cache or default_cache(), arch, dataset, seed) / "model.safetensors")
    )
    return model.eval()


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> tuple[float, float]:
    """Accuracy and mean cross-entropy on a split."""
    model.eval()
    correct, loss = 0, 0.0
    for images, labels in split.batches():
        logits = model(images)
        correct += int((logits.argmax(1) == labels).sum())
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
    return correct / len(split), loss / len(split)


def train(
    arch: str, dataset: str, seed: int, train_split: Split, test_split: Split, schedule: Schedule, cache: Path
) -> Card:
    """Train one model, or finish an interrupted one, or return the card of a finished one."""
    directory = model_directory(cache, arch, dataset, seed)
    if card := read_card(directory):
        return card
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = directory / "checkpoint.pt"

    torch.manual_seed(seed)
    model = build(arch).to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(
        model.parameters(), schedule.rate, schedule.momentum, weight_decay=schedule.decay, nesterov=True
    )
    history: list[dict[str, float]] = []
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        history = state["history"]

    for epoch in range(len(history), len(schedule.sides)):
        watch = Stopwatch()
        loss = _epoch(model, optimiser, train_split, schedule, epoch, seed)
        spent = watch.read()
        # A glance on the way; the score that counts is the last epoch's, on the whole split.
        glance = test_split if epoch + 1 == len(schedule.sides) else test_split.head(1000)
        accuracy, test_loss = evaluate(model, glance)
        scores = {"test_images": len(glance), "test_accuracy": accuracy, "test_loss": test_loss}
        history.append({"loss": loss, **scores, **spent})
        done = f"loss {loss:.3f}, test accuracy {accuracy:.4f}, {spent['seconds']:.0f} s"
        print(f"{arch} {dataset} seed {seed} epoch {epoch + 1}: {done}", flush=True)
        save_checkpoint(checkpoint, model=model.state_dict(), optimiser=optimiser.state_dict(), history=history)

    # The cap keeps the train score cheap; the whole split would cost half an epoch.
    train_accuracy, train_loss = evaluate(model, train_split.head(10000))
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        directory / "model.safetensors",
    )
    card = Card(
        model=f"{arch} on {dataset}",
        command=command(),
        seed=seed,
        data={"dataset": dataset, "train": len(train_split), "test": len(test_split)},
        epochs=len(schedule.sides),
        training=asdict(schedule),
        scores={
            "test_accuracy": history[-1]["test_accuracy"],
            "test_loss": history[-1]["test_loss"],
            "train_accuracy_first_10000": train_accuracy,
            "train_loss_first_10000": train_loss,
        },
        history=history,
        seconds=sum(epoch["seconds"] for epoch in history),
    )
    card.write(directory)
    checkpoint.unlink(missing_ok=True)
    return card


def _epoch(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    split: Split,
    schedule: Schedule,
    epoch: int,
    seed: int,
) -> float:
    """One epoch; its randomness depends on (seed, epoch) only, so a resumed run equals an uninterrupted one."""
    model.train()
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    batches = len(split) // schedule.batch
    total = 0.0
    stream = training_batches(split, schedule.batch, generator, schedule.augment, schedule.sides[epoch])
    for step, (images, labels) in enumerate(stream):
        progress = (epoch * batches + step + 1) / (batches * len(schedule.sides))
        set_rate(optimiser, schedule.rate * triangle(progress, schedule.warmup))
        loss = F.cross_entropy(model(images), labels, label_smoothing=schedule.smoothing)
        optimiser.zero_grad()
        loss.backward()
        if schedule.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        optimiser.step()
        total += loss.item()
    return total / batches


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=sorted(ARCHITECTURES), required=True)
    parser.add_argument("--dataset", choices=DATASETS, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--limit", type=int, help="train on the first N images only")
    add_locations(parser)
    options = parser.parse_args(arguments)
    train_split, test_split = load_images(options.dataset, options.data, options.cache)
    if options.limit:
        train_split = train_split.head(options.limit)
    for arch in options.arch:
        for seed in options.seeds:
            card = train(arch, options.dataset, seed, train_split, test_split, SCHEDULES[arch], options.cache)
            print(
                f"{card.model} seed {seed}: {card.scores['test_accuracy']:.4f}, {card.seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
