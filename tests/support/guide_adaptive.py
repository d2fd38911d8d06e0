"""What docs/adaptive.md takes for granted: the reader's own module, library, heads and inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from merganser.experts import Library
from merganser.experts.activations import pool
from support.expert_nets import WIDTH, Block, expert_of, heads_of

TASKS = ("law", "math", "code")


class TextEncoder(nn.Module):
    """Ids and a mask to samples × tokens × width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x * attention_mask[..., None])
        return x


def prologue() -> dict[str, Any]:
    """The page's names. Builds the library `lib/` in the current directory."""
    encoder = TextEncoder().eval()
    Library.build(encoder, {task: expert_of(encoder, seed, rank=2) for seed, task in enumerate(TASKS)}, "lib")
    return {
        "encoder": encoder,
        "heads": heads_of(TASKS),
        "pooled": lambda output, inputs: pool(output, "mean", inputs.mask),
        "ids": torch.arange(12).reshape(3, 4),
        "mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]),
        "seen": {task: torch.randn(8, WIDTH) for task in TASKS},
    }
