"""Image sets as uint8 arrays in memory, and batches of them augmented in one indexing operation."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.zoo.cards import data_file
from merganser.errors import InputError, did_you_mean

DATASETS = ("mnist", "fashion_mnist", "cifar10")
#: Pixels by which augmented crops move. Ten epochs underfit, and the usual 4 make that worse.
MARGIN = 2


@dataclass(frozen=True)
class Split:
    """Images N×H×W×C uint8, labels N, and the channel statistics of the training images (in 0…1)."""

    images: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def head(self, count: int) -> Split:
        """The first `count` images, a random sample: the order is a fixed shuffle."""
        return Split(self.images[:count], self.labels[:count], self.mean, self.std)

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 N×H×W×C to float N×C×H×W in channels-last memory, zero mean and unit variance."""
        return ((images.float() / 255 - self.mean) / self.std).permute(0, 3, 1, 2)

    def batches(self, size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
        """The split in order, for evaluation."""
        for i in range(0, len(self), size):
            yield self.normalise(self.images[i : i + size]), self.labels[i : i + size]


def lossless_file(cache: Path) -> Path:
    """Return where `benchmarks.zoo.cifar10` stores CIFAR-10 without loss."""
    return cache / "data" / "cifar10.npz"


def load_images(name: str, data: Path, cache: Path) -> tuple[Split, Split]:
    """Return the train and test split of a set.

    CIFAR-10 comes without loss if `benchmarks.zoo.cifar10` stored it in the cache; otherwise it is decoded from JPEG
    once (about 20 s) and cached.
    """
    if name not in DATASETS:
        raise InputError(f"unknown image set {name!r}{did_you_mean(name, DATASETS)}")
    if name == "cifar10" and not lossless_file(cache).exists():
        (train_x, train_y), (test_x, test_y) = (_decoded(part, data, cache) for part in ("train", "test"))
    else:
        with np.load(lossless_file(cache) if name == "cifar10" else data_file(data, f"{name}.npz")) as file:
            train_x, train_y, test_x, test_y = (file[key] for key in ("train_x", "train_y", "test_x", "test_y"))
        if train_x.ndim == 3:
            train_x, test_x = train_x[..., None], test_x[..., None]
    levels = [np.bincount(train_x[..., c].ravel(), minlength=256) for c in range(train_x.shape[3])]
    mean, std = _moments(np.stack(levels))
    train, test = (_shuffled(x, y, mean, std) for x, y in ((train_x, train_y), (test_x, test_y)))
    return train, test


def _moments(levels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel in 0…1, from its histogram of 256 levels."""
    share = levels / levels.sum(1, keepdims=True)
    values = np.arange(256) / 255
    mean = share @ values
    return torch.from_numpy(mean).float(), torch.from_numpy(np.sqrt(share @ values**2 - mean**2)).float()


def _shuffled(images: np.ndarray, labels: np.ndarray, mean: Tensor, std: Tensor) -> Split:
    """Some of the files are sorted by class; a fixed shuffle makes any prefix a sample."""
    order = np.random.default_rng(0).permutation(len(labels))
    return Split(torch.from_numpy(images[order]), torch.from_numpy(labels[order].astype(np.int64)), mean, std)


def _decoded(part: str, data: Path, cache: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(data_file(data, "cifar10_jpeg.npz")) as file:
        labels = file[f"{part}_y"]
        stored = cache / "data" / f"cifar10_{part}.npy"
        if not stored.exists():
            from PIL import Image

            ends = file[f"{part}_end"].tolist()
            blob = file[f"{part}_jpeg"].tobytes()
            pictures = (Image.open(io.BytesIO(blob[a:b])) for a, b in zip([0, *ends], ends, strict=False))
            stored.parent.mkdir(parents=True, exist_ok=True)
            draft = stored.with_name(f"draft_{stored.name}")
            np.save(draft, np.stack([np.asarray(picture.convert("RGB")) for picture in pictures]))
            draft.replace(stored)
    return np.load(stored), labels


def training_batches(
    split: Split, size: int, generator: torch.Generator, augment: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one shuffled epoch, last partial batch dropped; crops of the padded image, flipped half the time."""
    order = torch.randperm(len(split), generator=generator)
    height, width = split.images.shape[1:3]
    padded = F.pad(split.images, (0, 0, *[MARGIN] * 4)) if augment else split.images
    for start in range(0, len(split) - size + 1, size):
        chosen = order[start : start + size]
        images = _crop_and_flip(padded, chosen, height, width, generator) if augment else padded[chosen]
        yield split.normalise(images), split.labels[chosen]


def _crop_and_flip(padded: Tensor, chosen: Tensor, height: int, width: int, generator: torch.Generator) -> Tensor:
    top, left = (torch.randint(0, 2 * MARGIN + 1, (len(chosen), 1), generator=generator) for _ in range(2))
    flip = torch.rand(len(chosen), 1, generator=generator) < 0.5
    rows = top + torch.arange(height)
    columns = left + torch.where(flip, torch.arange(width - 1, -1, -1), torch.arange(width))
    return padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
