"""MiniLM text experts in memory, merged through the public API and scored on sentences of their tasks.

Only tensors that some expert changed are merged (embeddings and lower layers were frozen in training, so nothing else
can move); every task answers through its own head. Test sentences are the first `test` of the shuffled test file,
validation sentences the first `validation` of those held out of the training file; the two are disjoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as memoise
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

import merganser as mg
from benchmarks.zoo.text import Schedule, expert_directory, load_head, save_base, train
from benchmarks.zoo.text_layers import layers_from, with_states
from benchmarks.zoo.text_tasks import TASKS, Task, load_task, right
from merganser.evaluate.accuracy import normalized_accuracy
from merganser.tuning.search import scaled

State = dict[str, Tensor]
Part = Literal["test", "validation"]


@dataclass(frozen=True)
class TextExperts:
    """The base, its experts reduced to the tensors that training changed, heads and sentences, by task."""

    base: State
    experts: Mapping[str, State]
    heads: Mapping[str, Mapping[str, Tensor]]
    tasks: Mapping[str, Task]

    @property
    def trained(self) -> State:
        """The base's tensors that training changed."""
        some = next(iter(self.experts.values()))
        return {name: self.base[name] for name in some}

    @property
    def trained_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.trained.values())

    def task_vector(self, method: str, names: Sequence[str], **parameters: Any) -> State:
        """merged − base of `mg.merge` with these experts, at scale 1 unless told otherwise."""
        trained = self.trained
        merged = mg.merge({name: self.experts[name] for name in names}, method, trained, **parameters)
        return differences(merged, trained)

    def weights(self, vector: Mapping[str, Tensor], alpha: float = 1.0) -> State:
        """θ_0 + α·τ, all tensors."""
        return scaled(self.base, vector, alpha)

    def whole(self, expert: Mapping[str, Tensor]) -> State:
        """An expert with the tensors it shares with the base."""
        return {**self.base, **expert}

    def answers(self, weights: Mapping[str, Tensor], names: Sequence[str], part: Part = "test") -> dict[str, Tensor]:
        """Whether one encoder with each task's head answers the task's sentences right."""
        layers = layers_from(weights)
        return {name: right(layers, self.heads[name], getattr(self.tasks[name], part)) for name in names}

    def scores(self, weights: Mapping[str, Tensor], names: Sequence[str], part: Part = "test") -> dict[str, float]:
        """Accuracy on each task of one encoder with that task's head."""
        return {name: float(found.float().mean()) for name, found in self.answers(weights, names, part).items()}

    def own_answers(self, experts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Whether each expert answers the sentences of its own task right."""
        return {name: self.answers(self.whole(expert), [name])[name] for name, expert in experts.items()}

    def own_scores(self, experts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
        """Accuracy of each expert on its own task."""
        return {name: float(found.float().mean()) for name, found in self.own_answers(experts).items()}


@memoise
def load_sentences(name: str, data: Path, cache: Path, test: int, validation: int) -> Task:
    """A task whose test and validation sentences, so many of them, are ready for the trained layers."""
    task = load_task(name, data, cache)
    return replace(
        task,
        test=with_states(task.test.slice(0, test)),
        validation=with_states(task.validation.slice(0, validation)) if validation else task.validation.slice(0, 0),
    )


def load_experts(
    cache: Path,
    data: Path,
    names: Sequence[str] = TASKS,
    *,
    test: int,
    validation: int,
    seed: int = 0,
    early: bool = False,
) -> TextExperts:
    """The experts of the zoo, trained if it lacks them; with `early`, as they were after one epoch."""
    base = floats(save_base(cache))
    for name in names:
        train(load_task(name, data, cache), seed, Schedule(), cache)
    whole = {name: floats(expert_directory(cache, name, seed) / ("epoch1" if early else "")) for name in names}
    moved = changed(base, whole.values())
    return TextExperts(
        base,
        {name: {tensor: expert[tensor] for tensor in moved} for name, expert in whole.items()},
        {name: load_head(name, seed, cache, early) for name in names},
        {name: load_sentences(name, data, cache, test, validation) for name in names},
    )


def floats(directory: Path) -> State:
    """The floating-point tensors of a checkpoint directory of one file."""
    found = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


def changed(base: Mapping[str, Tensor], experts: Any) -> list[str]:
    """Names of tensors in which some expert differs from the base, in the base's order."""
    experts = list(experts)
    return [name for name, tensor in base.items() if any(not torch.equal(e[name], tensor) for e in experts)]


def differences(weights: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> State:
    """θ − θ_0 of the base's tensors."""
    return {name: weights[name] - tensor for name, tensor in base.items()}


def summary(scores: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, Any]:
    """Mean absolute and normalised accuracy, and the accuracies behind them."""
    return {
        "accuracy": sum(scores.values()) / len(scores),
        "normalised": normalized_accuracy(scores, reference),
        "per_task": dict(scores),
    }
