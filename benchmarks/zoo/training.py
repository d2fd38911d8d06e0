"""What the training programs share: the learning rate's shape, a clock, checkpoints that are whole or absent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


def triangle(progress: float, warmup: float) -> float:
    """Rises linearly from 0 to 1 over the first `warmup` of all steps, then falls linearly to 0."""
    return min(progress / warmup, (1 - progress) / (1 - warmup))


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Use one learning rate for all parameters."""
    for group in optimiser.param_groups:
        group["lr"] = rate


@dataclass(frozen=True)
class Stopwatch:
    """Seconds since its making: by the clock on the wall, and of processor time, which a busy machine does not blur."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)

    def read(self) -> dict[str, float]:
        """`seconds` and `cpu_seconds`, to a tenth."""
        elapsed = {"seconds": time.perf_counter() - self.wall, "cpu_seconds": time.process_time() - self.cpu}
        return {name: round(value, 1) for name, value in elapsed.items()}


def save_checkpoint(path: Path, **state: Any) -> None:
    """Write a checkpoint beside its place and move it there: an interruption leaves the previous one."""
    draft = path.with_suffix(".part")
    torch.save(state, draft)
    draft.replace(path)
