"""Ten image tasks for one backbone, made of MNIST, Fashion-MNIST and CIFAR-10: no two ask the same of the same images.

Whole label sets, parts and coarse classes of them, inverted colours, and "which way is up": the image turned by 0 to 3
quarters, to be told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as memoise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.zoo.images import Split, load_images
from merganser.errors import InputError, did_you_mean

SIDE = 64
VALIDATION = 500
TEST = 2000


@dataclass(frozen=True)
class Variant:
    """A set, the classes that its labels become (None: the image is left out), and what is done to its images."""

    dataset: str
    classes: tuple[int | None, ...] = tuple(range(10))
    inverted: bool = False
    turned: bool = False


#: Kinds of garments are tops, trousers, dresses, footwear and bags.
IMAGE_TASKS: dict[str, Variant] = {
    "digits": Variant("mnist"),
    "digits-inverted": Variant("mnist", inverted=True),
    "digits-parity": Variant("mnist", (0, 1) * 5),
    "digits-turned": Variant("mnist", turned=True),
    "garments": Variant("fashion_mnist"),
    "garments-kinds": Variant("fashion_mnist", (0, 1, 0, 2, 0, 3, 0, 3, 4, 3), inverted=True),
    "garments-turned": Variant("fashion_mnist", turned=True),
    "animals": Variant("cifar10", (None, None, 0, 1, 2, 3, 4, 5, None, None)),
    "vehicles": Variant("cifar10", (0, 1, None, None, None, None, None, None, 2, 3)),
    "pictures-turned": Variant("cifar10", turned=True),
}


@dataclass(frozen=True)
class Images:
    """Images N×C×H×W uint8 and labels N, shown to the backbone in colour, 64 pixels wide and within ±1."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def head(self, count: int) -> Images:
        """The first `count`, a random sample: the order is a fixed shuffle."""
        return Images(self.images[:count], self.labels[:count])

    def batch(self, chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Inputs N×3×64×64 and labels of some of the images."""
        images = (self.images[chosen].float() - 127) / 128
        wide = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        return wide.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last), self.labels[chosen]


@dataclass(frozen=True)
class ImageTask:
    """A task's training, validation (held out of the training images) and test images."""

    name: str
    classes: int
    train: Images
    validation: Images
    test: Images


@memoise
def _load(dataset: str, data: Path, cache: Path) -> tuple[Split, Split]:
    return load_images(dataset, data, cache)


def load_image_task(name: str, data: Path, cache: Path) -> ImageTask:
    """A task by name; at most 2,000 test images."""
    if name not in IMAGE_TASKS:
        raise InputError(f"unknown image task {name!r}{did_you_mean(name, IMAGE_TASKS)}")
    variant = IMAGE_TASKS[name]
    train, test = (apply(variant, split) for split in _load(variant.dataset, data, cache))
    classes = int(test.labels.max()) + 1
    rest = Images(train.images[VALIDATION:], train.labels[VALIDATION:])
    return ImageTask(name, classes, rest, train.head(VALIDATION), test.head(TEST))


def apply(variant: Variant, split: Split) -> Images:
    """Make a variant's images and labels of a set's."""
    classes = torch.tensor([-1 if each is None else each for each in variant.classes])[split.labels]
    kept = classes >= 0
    images, labels = split.images[kept].permute(0, 3, 1, 2), classes[kept]
    if variant.inverted:
        images = 255 - images
    if variant.turned:
        labels = torch.arange(len(labels)) % 4
        images = torch.stack([image.rot90(k, (1, 2)) for image, k in zip(images, labels.tolist(), strict=True)])
    return Images(images.contiguous(), labels)
