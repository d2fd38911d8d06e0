"""Small transformers from several seeds, trained far enough to have left their initialisation.

`train(kind, seed, task, cache)` returns the initial and the trained network of one seed: "vit" classifies the patches
of Fashion-MNIST (LayerNorm), "gpt" predicts the next character of film reviews (RMSNorm). Trained weights are cached.
"vit-cifar10" is the larger patch transformer of `benchmarks.zoo.vision`, which has to be there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.zoo import vit
from benchmarks.zoo.cards import default_cache
from benchmarks.zoo.images import Split, load_images
from benchmarks.zoo.vision import initial_model, load_model

CONTEXT = 32
ALPHABET = " abcdefghijklmnopqrstuvwxyz.,'-!?0123456789\n"


class Attention(nn.Module):
    """Multi-head attention with a projection each for queries, keys, values and the output."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, norm: type[nn.Module], causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Patches of 7 × 7 pixels, LayerNorm, the mean over patches, a linear head."""

    def __init__(self, width: int = 48, heads: int = 4, depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Linear(49, width)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, heads, nn.LayerNorm, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 784)."""
        patches = images.reshape(-1, 4, 7, 4, 7).transpose(2, 3).reshape(-1, 16, 49)
        return self.head(self.norm(self.blocks(self.patches(patches) + self.positions)).mean(1))


class GPT(nn.Module):
    """Characters, learned positions, RMSNorm, causal attention, a head that is not tied."""

    def __init__(self, width: int = 48, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads, nn.RMSNorm, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, len(ALPHABET))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch · length, characters) of the character after each."""
        x = self.tokens(tokens) + self.positions
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


@dataclass(frozen=True)
class Task:
    """Inputs and targets for training and for testing."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches without end."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in torch.randperm(len(self.inputs), generator=generator).split(size)[:-1]:
                yield self.inputs[chosen], self.targets[chosen].flatten()

    def test(self, size: int = 500, most: int = 10) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self.test_inputs.split(size), self.test_targets.split(size), strict=True)
        return [(x, y.flatten()) for x, y in list(pairs)[:most]]


def images(data: Path) -> Task:
    """Fashion-MNIST, pixels centred and scaled."""
    file = np.load(data / "fashion_mnist.npz")

    def pixels(name: str) -> Tensor:
        return torch.from_numpy(file[name].reshape(-1, 784).astype(np.float32) / 255.0 - 0.2860) / 0.3530

    def labels(name: str) -> Tensor:
        return torch.from_numpy(file[name].astype(np.int64))

    return Task(pixels("train_x"), labels("train_y"), pixels("test_x"), labels("test_y"))


def text(data: Path) -> Task:
    """Film reviews in lower case, cut into windows of `CONTEXT` characters and the one after."""

    def windows(name: str) -> tuple[Tensor, Tensor]:
        lines = (data / "text" / name).read_text(encoding="utf-8").splitlines()
        joined = "\n".join(line.split("\t", 1)[1].lower() for line in lines)
        known = {character: place for place, character in enumerate(ALPHABET)}
        tokens = torch.tensor([known[c] for c in joined if c in known])
        cut = tokens[: (len(tokens) - 1) // CONTEXT * CONTEXT + 1]
        return cut[:-1].reshape(-1, CONTEXT), cut[1:].reshape(-1, CONTEXT)

    return Task(*windows("mr.train.tsv"), *windows("mr.test.tsv"))


def small_photographs(data: Path) -> Task:
    """The first images of CIFAR-10: batches take a few thousand."""

    def stacked(split: Split, most: int) -> tuple[Tensor, Tensor]:
        batches = list(split.head(most).batches())
        return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    train, test = load_images("cifar10", data, default_cache())
    return Task(*stacked(train, 8_000), *stacked(test, 5_000))


CIFAR10 = "vit-cifar10"
KINDS = {"vit": (ViT, images, 64), "gpt": (GPT, text, 32), CIFAR10: (vit.ViT, small_photographs, 64)}


def train(
    kind: str, seed: int, task: Task, cache: Path | None = None, steps: int = 1200, rate: float = 3e-3
) -> tuple[nn.Module, nn.Module]:
    """Return the network of a seed at its initialisation, and trained (one cycle of AdamW, or by the zoo)."""
    if kind == CIFAR10:
        return initial_model("vit", seed), load_model("vit", "cifar10", seed)
    make, _, size = KINDS[kind]
    torch.manual_seed(seed)
    initial, trained = make().apply(_initialise), make()
    trained.load_state_dict(initial.state_dict())
    path = cache / f"{kind}-{seed}-{steps}.safetensors" if cache else None
    return initial.eval(), fit(trained, task.batches(size, seed), steps, rate, 0.1, path)


def fit(
    network: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    steps: int,
    rate: float,
    decay: float,
    path: Path | None,
) -> nn.Module:
    """Return the network with the weights at `path`, or trained with one cycle of AdamW and stored there."""
    if path and path.exists():
        network.load_state_dict(load_file(path))
        return network.eval()
    optimiser = torch.optim.AdamW(network.parameters(), rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.2)
    for inputs, targets in islice(batches, steps):
        optimiser.zero_grad()
        cross_entropy(network(inputs), targets).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(network.state_dict(), path)
    return network.eval()


def _initialise(layer: nn.Module) -> None:
    """Small weights, as is usual for transformers: training soon leaves them behind."""
    if isinstance(layer, nn.Linear | nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear):
        nn.init.zeros_(layer.bias)


def score(network: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Mean loss and accuracy."""
    with torch.no_grad():
        found = [(network(x), y) for x, y in batches]
    logits, targets = (torch.cat(part) for part in zip(*found, strict=True))
    return float(cross_entropy(logits, targets)), float((logits.argmax(1) == targets).double().mean())


def drift(initial: nn.Module, trained: nn.Module) -> float:
    """The median over weight matrices of the cosine between initial and trained weights."""
    before, after = initial.state_dict(), trained.state_dict()
    cosines = [
        float(torch.cosine_similarity(before[name].flatten(), tensor.flatten(), dim=0))
        for name, tensor in after.items()
        if tensor.dim() > 1
    ]
    return sorted(cosines)[math.ceil(len(cosines) / 2) - 1]
