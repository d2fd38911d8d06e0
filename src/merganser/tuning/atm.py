"""ATM: alternate tuning and merging from the current point, so that task vectors stay short and close to gradients."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from merganser.checkpoints import open as open_checkpoint
from merganser.checkpoints.hashing import content_hash
from merganser.engine.geometry import cosines
from merganser.errors import InputError
from merganser.modules.functional import Weights, WeightsScore
from merganser.plain import Result
from merganser.strict_json import read_json
from merganser.tuning.statistics import replace_file

TrainTask: TypeAlias = Callable[[Weights, int], Weights]
"""`step(weights, epochs)`: fine-tune from `weights` on one task for that many epochs, return the new weights."""


@dataclass(frozen=True)
class Round(Result):
    """One tuning-and-merging round: ‖τ_t‖ per task, the norm of the merged update, mean pairwise cosine, the score."""

    number: int
    epochs_spent: int
    """Epochs that each task has been tuned for, including this round."""
    task_norms: dict[str, float]
    update_norm: float
    mean_cosine: float
    score: float | None


@dataclass(frozen=True, eq=False)
class ATM:
    """The weights after the last round, and the history of all rounds."""

    weights: dict[str, Tensor]
    history: tuple[Round, ...]


def atm(
    base: Weights,
    steps: Mapping[str, TrainTask],
    *,
    budget: int,
    epochs_per_round: int = 1,
    alpha: float = 1.0,
    average: bool = True,
    score: WeightsScore | None = None,
    path: str | os.PathLike[str] | None = None,
) -> ATM:
    """Iterate θ⁽ᵏ⁺¹⁾ = θ⁽ᵏ⁾ + (α/T) Σ_t τ_t⁽ᵏ⁾ (with `average=False` α Σ_t τ_t⁽ᵏ⁾), τ_t⁽ᵏ⁾ tuned from θ⁽ᵏ⁾.

    The data of the step functions decide between ATM and PA-ATM (a task's training data, or held-out data that its
    owner shares instead); the update with `average` is the thesis' for PA-ATM. With one gradient-descent step per round
    it is joint training on the mean loss with step αη.

    Args:
        base: The weights θ⁽⁰⁾ to start from.
        steps: For each task, a function of weights and a number of epochs that returns the tuned weights.
        budget: The epochs of each task.
        epochs_per_round: Epochs between two merges; a remainder of the budget makes a shorter last round.
        alpha: The scale α of the merged update.
        average: Divide the sum of the task vectors by their number T.
        score: A function of weights whose value the history records.
        path: A directory for the finished rounds. A later call continues after the last one, also with a larger budget.

    Returns:
        The weights after the last round, and the history.

    Raises:
        InputError: If there are no tasks or no epochs, or the directory contains another run.

    Example:
        >>> found = mg.tuning.atm.atm(base.state_dict(), {"math": tune_math, "code": tune_code}, budget=6)
        >>> len(found.history)
        6
    """
    if not steps:
        raise InputError("no tasks; ATM needs a step function for each task")
    if budget < 1 or epochs_per_round < 1:
        raise InputError(f"budget and epochs_per_round must be positive, got {budget} and {epochs_per_round}")
    settings = {
        "base": content_hash(open_checkpoint(base)),
        "tasks": sorted(steps),
        "alpha": alpha,
        "average": average,
        "epochs_per_round": epochs_per_round,
    }
    current = {name: value.detach().clone() for name, value in base.items()}
    history: list[Round] = []
    store = None if path is None else _Store(Path(path), settings)
    if store is not None and (saved := store.load()):
        weights, history = saved
        # In the base's order and own memory, so that sums have the same bits as in an uninterrupted run.
        current = {name: weights[name].clone() for name in current}
    while (spent := history[-1].epochs_spent if history else 0) < budget:
        epochs = min(epochs_per_round, budget - spent)
        vectors = {
            task: _displacement(step({n: v.clone() for n, v in current.items()}, epochs), current, task)
            for task, step in steps.items()
        }
        update = _sum_scaled(list(vectors.values()), alpha / len(steps) if average else alpha)
        current = {
            name: (value.to(update[name].dtype) + update[name]).to(value.dtype) if name in update else value
            for name, value in current.items()
        }
        history.append(_round(len(history) + 1, spent + epochs, vectors, update, score and score(current)))
        if store is not None:
            store.save(current, history)
    return ATM(current, tuple(history))


def _displacement(tuned: Weights, current: Weights, task: str) -> dict[str, Tensor]:
    if missing := [name for name in current if name not in tuned]:
        raise InputError(f"the step of task {task!r} returned weights without {missing[0]!r}")
    wide = {n: torch.promote_types(v.dtype, torch.float32) for n, v in current.items() if v.is_floating_point()}
    return {name: tuned[name].detach().to(dtype) - current[name].to(dtype) for name, dtype in wide.items()}


def _sum_scaled(vectors: Sequence[Weights], scale: float) -> dict[str, Tensor]:
    return {name: scale * torch.stack([vector[name] for vector in vectors]).sum(0) for name in vectors[0]}


def _round(number: int, spent: int, vectors: Mapping[str, Weights], update: Weights, score: float | None) -> Round:
    tasks = list(vectors)
    gram = torch.zeros(len(tasks), len(tasks), dtype=torch.float64)
    for name in update:
        stack = torch.stack([vectors[task][name].reshape(-1).double() for task in tasks])
        gram += stack @ stack.T
    norms = gram.diagonal().sqrt()
    cosine = cosines(gram.numpy())
    pairs = len(tasks) * (len(tasks) - 1)
    return Round(
        number=number,
        epochs_spent=spent,
        task_norms={task: float(norm) for task, norm in zip(tasks, norms, strict=True)},
        update_norm=sum(float(v.double().square().sum()) for v in update.values()) ** 0.5,
        mean_cosine=float((cosine.sum() - cosine.trace()) / pairs) if pairs else 1.0,
        score=None if score is None else float(score),
    )


class _Store:
    """`round-0003.safetensors` and `history.json`, each replaced atomically; the history names its round."""

    def __init__(self, directory: Path, settings: dict[str, object]) -> None:
        self.directory = directory
        self.settings = settings
        directory.mkdir(parents=True, exist_ok=True)

    def load(self) -> tuple[dict[str, Tensor], list[Round]] | None:
        index = self.directory / "history.json"
        if not index.exists():
            return None
        try:
            record = read_json(index)
            begun = {name: record["settings"][name] for name in self.settings}
            history = [Round(**entry) for entry in record["rounds"]]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{index}: damaged ({error}); use another directory") from None
        if other := next((name for name in self.settings if begun[name] != self.settings[name]), None):
            raise InputError(
                f"{index}: started with {other} {begun[other]}, but now it is {self.settings[other]}; "
                "use another directory"
            )
        return load_file(self._weights(history[-1].number)), history

    def save(self, weights: Weights, history: list[Round]) -> None:
        number = history[-1].number
        replace_file(self._weights(number), lambda path: save_file(_copy_shared(weights), path))
        rounds = [{k: v for k, v in entry.to_dict().items() if k != "kind"} for entry in history]
        text = json.dumps({"settings": self.settings, "rounds": rounds}, indent=1)
        replace_file(self.directory / "history.json", lambda path: path.write_text(text))
        if number > 1:
            self._weights(number - 1).unlink(missing_ok=True)

    def _weights(self, number: int) -> Path:
        return self.directory / f"round-{number:04d}.safetensors"


def _copy_shared(weights: Weights) -> dict[str, Tensor]:
    """Copy tensors that share storage (tied weights), which safetensors refuses."""
    return {name: value.detach().clone().contiguous() for name, value in weights.items()}
