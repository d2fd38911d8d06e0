"""What the training programs share: the learning rate's shape, a clock, checkpoints that are whole or absent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

History = dict[str, float]


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


class Stateful(Protocol):
    """What a checkpoint holds: modules and optimisers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def run_epochs(
    checkpoint: Path, parts: Mapping[str, Stateful], epochs: int, run: Callable[[int], dict[str, float]]
) -> list[History]:
    """Run the epochs that a checkpoint lacks and return what every epoch reported, with its time.

    The checkpoint is written after each epoch. If `run`'s randomness depends on the epoch alone, an interrupted
    training ends like a whole one.

    Args:
        checkpoint: File of the states; need not exist.
        parts: What the states belong to, by name.
        epochs: How many epochs there are in all.
        run: Trains the epoch of this number (from 0) and returns figures of it.
    """
    history: list[History] = []
    if checkpoint.exists():
        stored = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(stored[name])
        history = stored["history"]
    for epoch in range(len(history), epochs):
        watch = Stopwatch()
        history.append({**run(epoch), **watch.read()})
        save_checkpoint(checkpoint, **{name: part.state_dict() for name, part in parts.items()}, history=history)
    return history


def save_checkpoint(path: Path, **state: Any) -> None:
    """Write a checkpoint beside its place and move it there: an interruption leaves the previous one."""
    draft = path.with_suffix(".part")
    torch.save(state, draft)
    draft.replace(path)
