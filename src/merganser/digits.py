"""Small real networks on scikit-learn's handwritten digits, for the demo and the examples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from merganser.errors import require

TRAIN = 1200
WIDTH = 512


class Digits:
    """The data set, four tasks made from it, and training that takes seconds."""

    tasks: Mapping[str, Callable[[Tensor], Tensor]] = {
        "upright": lambda x: x,
        "flipped": lambda x: x.flip(1),
        "turned": lambda x: x.rot90(1, (1, 2)),
        "inverted": lambda x: 1 - x,
    }

    def __init__(self, seed: int = 0) -> None:
        datasets = require("sklearn.datasets", "demo")
        images, labels = datasets.load_digits(return_X_y=True)
        self._generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(images), generator=self._generator)
        self._images = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8)[order] / 16
        self._labels = torch.tensor(labels)[order]

    def example(self, count: int = 2) -> Tensor:
        return self._images[:count]

    @property
    def test_images(self) -> int:
        """Return the number of test images, the same for every task."""
        return len(self._labels) - TRAIN

    def test(self, task: str) -> tuple[Tensor, Tensor]:
        """Return the test images and labels of a task."""
        return self.tasks[task](self._images[TRAIN:]), self._labels[TRAIN:]

    def train_base(self) -> nn.Module:
        """Train a base that is mediocre at everything, on a few samples of every task."""
        images = torch.cat([view(self._images[:TRAIN]) for view in self.tasks.values()])
        labels = self._labels[:TRAIN].repeat(len(self.tasks))
        few = torch.randperm(len(images), generator=self._generator)[: TRAIN // 4]
        return self._train(self._network(0), images[few], labels[few], steps=200, rate=1e-3)

    def fine_tune(self, base: nn.Module, task: str) -> nn.Module:
        images = self.tasks[task](self._images[:TRAIN])
        return self._train(copy.deepcopy(base), images, self._labels[:TRAIN], steps=40, rate=5e-4)

    def train_apart(self, seed: int) -> nn.Module:
        return self._train(self._network(seed), self._images[:TRAIN], self._labels[:TRAIN], steps=200, rate=1e-3)

    def accuracy(self, module: nn.Module, task: str) -> float:
        images, labels = self.test(task)
        with torch.inference_mode():
            return float((module(images).argmax(1) == labels).float().mean())

    def save(self, module: nn.Module, directory: Path) -> None:
        directory.mkdir(parents=True)
        save_file(module.state_dict(), directory / "model.safetensors", {"format": "pt"})

    def load(self, directory: Path) -> nn.Module:
        return self.from_state(load_file(directory / "model.safetensors"))

    def from_state(self, state: Mapping[str, Tensor]) -> nn.Module:
        module = self._network(0)
        module.load_state_dict(dict(state))
        return module

    def _network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
            )

    def _train(self, module: nn.Module, images: Tensor, labels: Tensor, steps: int, rate: float) -> nn.Module:
        optimiser = torch.optim.AdamW(module.parameters(), rate)
        for _ in range(steps):
            batch = torch.randint(len(images), (128,), generator=self._generator)
            loss = nn.functional.cross_entropy(module(images[batch]), labels[batch], label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        return module
