"""Fine-tune one EfficientNet-Lite0 per image task from the same base: experts for multi-task merging.

    python -m benchmarks.zoo.image_experts                     # all ten, seed 0
    python -m benchmarks.zoo.image_experts --tasks digits animals --seeds 0 1 2

The head is trained with the backbone. BatchNorm keeps the base's running statistics and trains its scale and shift
only, so that a merge needs no data to be scored. Takes 10 ms an image on one thread of a 2-core server processor,
about two minutes a task.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.zoo.cards import Card, add_locations, read_card
from benchmarks.zoo.efficientnet import FEATURES, EfficientNetLite0, load_backbone
from benchmarks.zoo.fine_tuning import CHECKPOINT, FineTuning, Material, fine_tune, guards, start_head, write_card
from benchmarks.zoo.image_tasks import IMAGE_TASKS, Images, ImageTask, load_image_task


@dataclass(frozen=True)
class ImageSchedule(FineTuning):
    """Two epochs of the first `images` training images."""

    epochs: int = 2
    rate: float = 1e-3
    images: int = 6_000


def expert_directory(cache: Path, task: str, seed: int = 0) -> Path:
    """A directory with the backbone's model.safetensors and head.safetensors."""
    return cache / "images" / task / f"seed{seed}"


def save_base(cache: Path) -> Path:
    """The base backbone as a directory with the same tensor names as the experts."""
    directory = cache / "images" / "base"
    if not (directory / "model.safetensors").exists():
        directory.mkdir(parents=True, exist_ok=True)
        _save(load_backbone(), directory)
    return directory


def load_expert(directory: Path) -> EfficientNetLite0:
    """A backbone in evaluation mode."""
    model = EfficientNetLite0()
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model.eval()


def load_head(task: str, seed: int, cache: Path) -> dict[str, Tensor]:
    """An expert's head: `weight` classes×1280 and `bias`."""
    return load_file(expert_directory(cache, task, seed) / "head.safetensors")


@torch.no_grad()
def accuracy(backbone: nn.Module, head: Mapping[str, Tensor], images: Images, batch: int = 100) -> float:
    """Share of the images that a backbone with this head classifies right."""
    backbone.eval()
    right = 0
    for start in range(0, len(images), batch):
        inputs, labels = images.batch(slice(start, start + batch))
        right += int(((backbone(inputs) @ head["weight"].T + head["bias"]).argmax(1) == labels).sum())
    return right / len(images)


def train(task: ImageTask, seed: int, schedule: ImageSchedule, cache: Path) -> Card:
    """Train one expert, or finish an interrupted one, or return the card of a finished one."""
    directory = expert_directory(cache, task.name, seed)
    if card := read_card(directory, schedule):
        return card
    directory.mkdir(parents=True, exist_ok=True)
    images = task.train.head(schedule.images)
    # Evaluation mode throughout keeps the running statistics.
    base, backbone = load_backbone(), load_backbone().to(memory_format=torch.channels_last)
    head = start_head(FEATURES, task.classes, schedule.head_spread, seed)

    def batches(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(images), generator=generator)
        for start in range(0, len(images), schedule.batch):
            yield images.batch(order[start : start + schedule.batch])

    material = Material(
        steps=-(-len(images) // schedule.batch),
        batches=batches,
        features=backbone,
        score=lambda: accuracy(backbone, head.state_dict(), task.test),
    )
    history = fine_tune(task.name, backbone, head, material, schedule, seed, directory / CHECKPOINT)
    scores = {
        "base_accuracy": accuracy(base, head.state_dict(), task.test),
        "test_accuracy": history[-1]["test_accuracy"],
    }
    _save(backbone, directory)
    save_file(head.state_dict(), directory / "head.safetensors")
    data = {"task": task.name, "classes": task.classes, "train": len(images), "test": len(task.test)}
    guarded = guards(base, backbone, scores["base_accuracy"], scores["test_accuracy"])
    model = f"EfficientNet-Lite0 on {task.name}"
    return write_card(directory, model, seed, data, schedule, material.steps, history, scores, guarded)


def _save(model: nn.Module, directory: Path) -> None:
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, directory / "model.safetensors")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=IMAGE_TASKS, default=list(IMAGE_TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    add_locations(parser)
    options = parser.parse_args(arguments)
    save_base(options.cache)
    for seed in options.seeds:
        for name in options.tasks:
            task = load_image_task(name, options.data, options.cache)
            card = train(task, seed, ImageSchedule(), options.cache)
            share = card.guards["base_share"]
            done = f"{card.scores['test_accuracy']:.4f}, base share {share:.2f}, {card.seconds:.0f} s"
            print(f"{card.model} seed {seed}: {done}", flush=True)


if __name__ == "__main__":
    main()
