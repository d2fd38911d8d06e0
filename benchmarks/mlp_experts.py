"""Experts of an MLP on image tasks of 28 × 28 pixels in memory (see `benchmarks.experts`), trained on the spot.

The base is the first MLP of `benchmarks.zoo.vision` on MNIST without its head. Each task takes the schedule of
`benchmarks.zoo.image_experts` and a few seconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.experts import Classifiers, Part, State, changed
from benchmarks.zoo.architectures import MLP
from benchmarks.zoo.fine_tuning import CHECKPOINT, Material, fine_tune, start_head
from benchmarks.zoo.image_experts import ImageSchedule, accuracy
from benchmarks.zoo.image_tasks import IMAGE_TASKS, Images, ImageTask, load_image_task
from benchmarks.zoo.vision import load_model

#: The tasks whose images are grey and of the base's size.
MLP_TASKS = tuple(name for name, variant in IMAGE_TASKS.items() if variant.dataset != "cifar10")


class Trunk(MLP):
    """The MLP without its head: images to features."""

    def __init__(self) -> None:
        super().__init__()
        self.width = self.head.in_features
        del self.head

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


@dataclass(frozen=True)
class SmallImages(Images):
    """Images as they are, within ±1."""

    def head(self, count: int) -> SmallImages:
        return SmallImages(self.images[:count], self.labels[:count])

    def batch(self, chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        return (self.images[chosen].float() - 127) / 128, self.labels[chosen]


@dataclass(frozen=True)
class MLPExperts(Classifiers[ImageTask]):
    """Trunks with a head for every task."""

    @cached_property
    def _shell(self) -> Trunk:
        return Trunk().eval()

    def backbone(self, weights: Mapping[str, Tensor]) -> nn.Module:
        self._shell.load_state_dict(dict(weights))
        return self._shell

    def logits(self, backbone: nn.Module, name: str, items: Sequence[int], part: Part) -> Tensor:
        images, head = getattr(self.tasks[name], part), self.heads[name]
        return backbone(images.batch(torch.tensor(list(items)))[0]) @ head["weight"].T + head["bias"]


def load_mlp_experts(
    cache: Path, data: Path, names: Sequence[str] = MLP_TASKS, *, test: int, validation: int, seed: int = 0
) -> MLPExperts:
    """Train the experts, and keep so many test and validation images of each task."""
    whole = load_model("mlp", "mnist", 0, cache).state_dict()
    base = {name: value for name, value in whole.items() if not name.startswith("head.")}
    tasks = {name: small(load_image_task(name, data, cache)) for name in names}
    pairs = {name: train(task, base, seed) for name, task in tasks.items()}
    moved = changed(base, [expert for expert, _ in pairs.values()])
    return MLPExperts(
        base,
        {name: {tensor: expert[tensor] for tensor in moved} for name, (expert, _) in pairs.items()},
        {
            name: replace(task, test=task.test.head(test), validation=task.validation.head(validation))
            for name, task in tasks.items()
        },
        {name: head for name, (_, head) in pairs.items()},
    )


def small(task: ImageTask) -> ImageTask:
    """The task with images of their own size."""
    parts = {name: getattr(task, name) for name in ("train", "validation", "test")}
    return replace(task, **{name: SmallImages(part.images, part.labels) for name, part in parts.items()})


def train(task: ImageTask, base: Mapping[str, Tensor], seed: int) -> tuple[State, State]:
    """Return the fine-tuned trunk and its head."""
    schedule = ImageSchedule()
    images = task.train.head(schedule.images)
    trunk = Trunk()
    trunk.load_state_dict(dict(base))
    head = start_head(trunk.width, task.classes, schedule.head_spread, seed)

    def batches(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(images), generator=generator).split(schedule.batch):
            yield images.batch(chosen)

    material = Material(
        steps=-(-len(images) // schedule.batch),
        batches=batches,
        features=trunk,
        score=lambda: accuracy(trunk, head.state_dict(), task.test),
    )
    with tempfile.TemporaryDirectory() as folder:
        fine_tune(task.name, trunk, head, material, schedule, seed, Path(folder) / CHECKPOINT)
    return trunk.state_dict(), head.state_dict()
