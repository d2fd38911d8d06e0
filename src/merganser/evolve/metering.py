"""What a process spends on candidates: seconds of loading, merging and asking, operations of the models asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook


@dataclass
class CostMeter:
    """What a process has spent on candidates since it was last asked.

    Operations are those of the layers that multiply by a matrix (linear layers, convolutions): a multiplication and an
    addition for each weight and each place it is used at. They are counted by hooks, which change no answer; attention
    itself, a small part for short texts, is left out.
    """

    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of a block to a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._add(part, time.perf_counter() - began)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Add the seconds and the operations of a block that asks a model."""
        hook = register_module_forward_hook(self._count)
        try:
            with self.timed("asking"):
                yield
        finally:
            hook.remove()

    def _count(self, module: nn.Module, inputs: Any, output: Any) -> None:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or not isinstance(output, Tensor) or weight.dim() < 2 or not output.numel():
            return
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            channels = output.shape[-1 if weight.dim() == 2 else 1]
            size = weight.numel()
            if isinstance(module, nn.Linear):  # 4-bit weights are stored in another shape
                size = module.in_features * module.out_features
            self._add("flops", 2.0 * size * output.numel() / channels)

    def take(self) -> dict[str, float]:
        """Return what was spent, and start anew."""
        spent, self.spent = self.spent, {}
        return spent

    def _add(self, part: str, amount: float) -> None:
        self.spent[part] = self.spent.get(part, 0.0) + amount
