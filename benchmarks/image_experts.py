"""EfficientNet-Lite0 image experts in memory (see `benchmarks.experts`), those of `benchmarks.zoo.image_experts`.

Experts keep the base's running statistics, so that a merge needs no data to be scored. Test and validation images are
the first of those a task has; training used neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.experts import Classifiers, Part, changed, floats
from benchmarks.zoo.efficientnet import EfficientNetLite0
from benchmarks.zoo.image_experts import ImageSchedule, expert_directory, load_head, save_base, train
from benchmarks.zoo.image_tasks import ImageTask, load_image_task

BATCH = 100


@dataclass(frozen=True)
class ImageExperts(Classifiers[ImageTask]):
    """Backbones with a head for every task."""

    @cached_property
    def _shell(self) -> EfficientNetLite0:
        return EfficientNetLite0().eval().to(memory_format=torch.channels_last)

    def backbone(self, weights: Mapping[str, Tensor]) -> nn.Module:
        self._shell.load_state_dict(weights, strict=False)  # counters of batches are no weights
        return self._shell

    def logits(self, backbone: nn.Module, name: str, items: Sequence[int], part: Part) -> Tensor:
        images, head = getattr(self.tasks[name], part), self.heads[name]
        found = [backbone(images.batch(own)[0]) for own in torch.tensor(list(items)).split(BATCH)]
        return torch.cat(found) @ head["weight"].T + head["bias"]


def load_image_experts(
    cache: Path, data: Path, names: Sequence[str], *, test: int, validation: int, seed: int = 0
) -> ImageExperts:
    """The experts of the zoo, trained if it lacks them, with so many test and validation images of each task."""
    base = floats(save_base(cache))
    tasks = {name: load_image_task(name, data, cache) for name in names}
    for task in tasks.values():
        train(task, seed, ImageSchedule(), cache)
    whole = {name: floats(expert_directory(cache, name, seed)) for name in names}
    moved = changed(base, whole.values())
    return ImageExperts(
        base,
        {name: {tensor: expert[tensor] for tensor in moved} for name, expert in whole.items()},
        {
            name: replace(task, test=task.test.head(test), validation=task.validation.head(validation))
            for name, task in tasks.items()
        },
        {name: load_head(name, seed, cache) for name in names},
    )
