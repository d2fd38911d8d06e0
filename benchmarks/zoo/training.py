"""What the training programs share: the shape of the learning rate and checkpoints that are whole or absent."""

from __future__ import annotations

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


def save_checkpoint(path: Path, **state: Any) -> None:
    """Write a checkpoint beside its place and move it there: an interruption leaves the previous one."""
    draft = path.with_suffix(".part")
    torch.save(state, draft)
    draft.replace(path)
