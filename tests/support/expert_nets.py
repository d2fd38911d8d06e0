"""Tiny networks with experts, for tests of input-adaptive models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from merganser.library import Library

WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Encoder(nn.Module):
    """samples × tokens × width to samples × width."""

    def __init__(self, width: int = WIDTH, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


def encoder(seed: int = 0) -> Encoder:
    torch.manual_seed(seed)
    return Encoder().eval()


def expert_of(base: nn.Module, seed: int, rank: int | None = None, size: float = 0.2) -> dict[str, Tensor]:
    """Every tensor moved at random, matrices by a matrix of the given rank."""
    rng = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in base.state_dict().items():
        delta = torch.randn(tensor.shape, generator=rng)
        if delta.dim() == 2 and rank is not None:
            left = torch.randn(tensor.shape[0], rank, generator=rng)
            delta = left @ torch.randn(rank, tensor.shape[1], generator=rng) / rank**0.5
        state[name] = tensor + size * delta
    return state


def library_of(path, base: nn.Module, experts: Mapping[str, Mapping[str, Tensor]], **options) -> Library:
    return Library.build(base.state_dict(), dict(experts), path / "lib", **options)


def small_library(path, tasks="abc", rank: int = 2) -> tuple[Encoder, Library]:
    """An encoder, and a library of experts of it whose updates have this rank, which it keeps."""
    base = encoder()
    experts = {task: expert_of(base, seed, rank) for seed, task in enumerate(tasks, start=1)}
    return base, library_of(path, base, experts, rank_fraction=rank / WIDTH)


def heads_of(tasks, width: int = WIDTH) -> dict[str, dict[str, Tensor]]:
    """A linear head per task with its own number of classes."""
    rng = torch.Generator().manual_seed(99)
    return {
        task: {
            "weight": torch.randn(2 + index, width, generator=rng),
            "bias": torch.randn(2 + index, generator=rng),
        }
        for index, task in enumerate(tasks)
    }
