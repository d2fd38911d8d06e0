"""Train image classifiers that differ only in their seed: same data, same schedule, other initialisation and order.

    python -m benchmarks.zoo.vision --arch mlp --dataset mnist --seeds 0 1 2 3 4
    python -m benchmarks.zoo.vision --arch resnet20-bn --dataset cifar10 --seeds 0 1 2 3 4

All networks on CIFAR-10 see full images, all of them, for the same number of steps. An epoch of ResNet20 takes 210 to
225 s of processor time on one thread of a 2-core server processor, with AVX-512 or without. Channels-last memory and a
fused optimiser help (a step takes 5.6 ms an image without them, 5.2 with the first, 4.4 with both); compiling does not
pay. `--precision bfloat16` (weights stay float32) pays on processors with fast bfloat16 products: on an AMD EPYC of the
fourth generation, with `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`, convolutional networks take .55 to .7 of the time (ten
epochs of VGG11 8.3 minutes) and the patch transformer 1.6 times. Without AVX-512 bfloat16 takes many times as long.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.records import command
from benchmarks.zoo.architectures import ARCHITECTURES, build
from benchmarks.zoo.cards import Card, add_locations, default_cache, read_card
from benchmarks.zoo.drift import drift
from benchmarks.zoo.images import DATASETS, Split, load_images, lossless_file, training_batches
from benchmarks.zoo.training import run_epochs, set_rate, triangle

#: What forward and backward passes compute in; weights and optimiser states are float32 either way.
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Schedule:
    """One cycle: the rate rises linearly over `warmup` of the steps, then falls linearly to zero.

    SGD has Nesterov momentum. The decay is strong enough for the initial weights to fade within the schedule: of SGD's,
    exp(−Σ rate·decay / (1 − momentum)) is left.
    """

    epochs: int
    rate: float
    optimiser: Literal["sgd", "adamw"] = "sgd"
    batch: int = 32
    warmup: float = 0.25
    momentum: float = 0.9
    decay: float = 5e-4
    smoothing: float = 0.05
    augment: bool = True
    precision: Precision = "float32"

    def build_optimiser(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimiser == "adamw":
            return torch.optim.AdamW(model.parameters(), self.rate, weight_decay=self.decay, fused=True)
        return torch.optim.SGD(
            model.parameters(), self.rate, self.momentum, weight_decay=self.decay, nesterov=True, fused=True
        )


#: As many epochs as two cores afford for all of them; equal, so that widths and architectures compare.
CIFAR_EPOCHS = 10
SCHEDULES = {
    "mlp": Schedule(10, rate=0.1, batch=128, decay=1e-3, smoothing=0.0, augment=False),
    "cnn": Schedule(6, rate=0.1, batch=64, decay=1e-3, smoothing=0.0, augment=False),
    "resnet20-bn": Schedule(CIFAR_EPOCHS, rate=0.06),
    "resnet20-bn-2x": Schedule(CIFAR_EPOCHS, rate=0.06),
    "resnet20-ln": Schedule(CIFAR_EPOCHS, rate=0.03),
    "resnet20-ln-2x": Schedule(CIFAR_EPOCHS, rate=0.03),
    "vgg11-bn": Schedule(CIFAR_EPOCHS, rate=0.03),
    "vit": Schedule(CIFAR_EPOCHS, rate=7e-4, optimiser="adamw", decay=0.2),
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


def initial_model(arch: str, seed: int) -> nn.Module:
    """A classifier as it was before training, from its seed."""
    torch.manual_seed(seed)
    return build(arch).eval()


@torch.no_grad()
def answer(model: nn.Module, split: Split) -> tuple[np.ndarray, float]:
    """Return which images of a split are classified correctly, and the mean cross-entropy.

    Batches of 100 fit the caches: ResNet20 takes half the time that it takes with 500.
    """
    model.eval()
    right, loss = [], 0.0
    for images, labels in split.batches(100):
        logits = model(images)
        right.append(logits.argmax(1) == labels)
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
    return torch.cat(right).numpy(), loss / len(split)


def evaluate(model: nn.Module, split: Split) -> tuple[float, float]:
    """Accuracy and mean cross-entropy on a split."""
    right, loss = answer(model, split)
    return float(right.mean()), loss


def train(
    arch: str, dataset: str, seed: int, train_split: Split, test_split: Split, schedule: Schedule, cache: Path
) -> Card:
    """Train one model, or finish an interrupted one, or return the card of a finished one."""
    directory = model_directory(cache, arch, dataset, seed)
    if card := read_card(directory, schedule):
        return card
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = directory / "checkpoint.pt"

    model = initial_model(arch, seed).to(memory_format=torch.channels_last)
    optimiser = schedule.build_optimiser(model)

    def run(epoch: int) -> dict[str, float]:
        loss = train_epoch(model, optimiser, train_split, schedule, epoch, seed)
        # A glance on the way; the score that counts is the last epoch's, on the whole split.
        glance = test_split if epoch + 1 == schedule.epochs else test_split.head(2000)
        accuracy, test_loss = evaluate(model, glance)
        print(
            f"{arch} {dataset} seed {seed} epoch {epoch + 1}: loss {loss:.3f}, test accuracy {accuracy:.4f}", flush=True
        )
        return {"loss": loss, "test_images": len(glance), "test_accuracy": accuracy, "test_loss": test_loss}

    history = run_epochs(checkpoint, {"model": model, "optimiser": optimiser}, schedule.epochs, run)
    # The cap keeps the train score cheap; the whole split would cost half an epoch.
    train_accuracy, train_loss = evaluate(model, train_split.head(5000))
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        directory / "model.safetensors",
    )
    card = Card(
        model=f"{arch} on {dataset}",
        command=command(),
        seed=seed,
        data={
            "dataset": dataset,
            "train": len(train_split),
            "test": len(test_split),
            "jpeg": dataset == "cifar10" and not lossless_file(cache).exists(),
        },
        epochs=schedule.epochs,
        steps=schedule.epochs * (len(train_split) // schedule.batch),
        training=asdict(schedule),
        scores={
            "test_accuracy": history[-1]["test_accuracy"],
            "test_loss": history[-1]["test_loss"],
            "train_accuracy_first_5000": train_accuracy,
            "train_loss_first_5000": train_loss,
        },
        history=history,
        seconds=sum(epoch["seconds"] for epoch in history),
        guards=drift(initial_model(arch, seed), model),
    )
    card.write(directory)
    checkpoint.unlink(missing_ok=True)
    return card


def train_epoch(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    split: Split,
    schedule: Schedule,
    epoch: int,
    seed: int,
) -> float:
    """Train for one epoch and return its mean loss.

    The randomness depends on (seed, epoch) only, so a resumed run equals an uninterrupted one.
    """
    model.train()
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    batches = len(split) // schedule.batch
    total = 0.0
    stream = training_batches(split, schedule.batch, generator, schedule.augment)
    for step, (images, labels) in enumerate(stream):
        progress = (epoch * batches + step + 1) / (batches * schedule.epochs)
        set_rate(optimiser, schedule.rate * triangle(progress, schedule.warmup))
        with torch.autocast("cpu", torch.bfloat16, enabled=schedule.precision == "bfloat16"):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=schedule.smoothing)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += loss.item()
    return total / batches


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=sorted(ARCHITECTURES), required=True)
    parser.add_argument("--dataset", choices=DATASETS, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--precision", choices=get_args(Precision), default="float32")
    add_locations(parser)
    options = parser.parse_args(arguments)
    train_split, test_split = load_images(options.dataset, options.data, options.cache)
    for arch in options.arch:
        for seed in options.seeds:
            schedule = replace(SCHEDULES[arch], precision=options.precision)
            card = train(arch, options.dataset, seed, train_split, test_split, schedule, options.cache)
            cosine = card.guards["median_cosine"]
            done = f"{card.scores['test_accuracy']:.4f}, cosine with the start {cosine:.2f}, {card.seconds:.0f} s"
            print(f"{card.model} seed {seed}: {done}", flush=True)


if __name__ == "__main__":
    main()
