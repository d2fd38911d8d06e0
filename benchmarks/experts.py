"""Experts of one base in memory, merged through the public API and scored on inputs of their tasks.

Only tensors that some expert changed are merged (nothing else can move). The tasks of classifiers answer through heads
of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import merganser as mg
from merganser.evaluate.accuracy import normalized_accuracy
from merganser.evaluate.search import scaled
from merganser.methods.registry import parameters as parameters_of
from merganser.methods.registry import registry

State = dict[str, Tensor]
Part = Literal["test", "validation"]
Task = TypeVar("Task")


@dataclass(frozen=True)
class Experts(ABC, Generic[Task]):
    """The base, its experts reduced to the tensors that training changed, and tasks with their questions, by task."""

    base: State
    experts: Mapping[str, State]
    tasks: Mapping[str, Task]

    @abstractmethod
    def backbone(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """These weights in one shared module: copy it if two are needed at once."""

    @abstractmethod
    def ask(self, weights: Mapping[str, Tensor], items: Mapping[str, Sequence[int]], part: Part) -> dict[str, Tensor]:
        """Whether one network answers these questions of every task right, in their order."""

    def answers(self, weights: Mapping[str, Tensor], names: Sequence[str], part: Part = "test") -> dict[str, Tensor]:
        """Whether one network answers the questions of some tasks right."""
        return self.ask(weights, {name: range(len(getattr(self.tasks[name], part))) for name in names}, part)

    @property
    def trained(self) -> State:
        """The base's tensors that training changed."""
        some = next(iter(self.experts.values()))
        return {name: self.base[name] for name in some}

    @property
    def trained_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.trained.values())

    def task_vector(self, method: str, names: Sequence[str], **parameters: Any) -> State:
        """merged − base of `mg.merge` with these experts, at scale 1 unless told otherwise.

        Methods for matrices decompose convolution kernels too.
        """
        trained = self.trained
        kernels = any(tensor.dim() > 2 for tensor in trained.values())
        shapes = {"convolutions": True} if kernels and "convolutions" in parameters_of(registry()[method]) else {}
        merged = mg.merge({name: self.experts[name] for name in names}, method, trained, **shapes | parameters)
        return differences(merged, trained)

    def weights(self, vector: Mapping[str, Tensor], alpha: float = 1.0) -> State:
        """θ_0 + α·τ, all tensors."""
        return scaled(self.base, vector, alpha)

    def whole(self, expert: Mapping[str, Tensor]) -> State:
        """An expert with the tensors it shares with the base."""
        return {**self.base, **expert}

    def scores(self, weights: Mapping[str, Tensor], names: Sequence[str], part: Part = "test") -> dict[str, float]:
        """Accuracy of one network on each task."""
        return {name: float(found.float().mean()) for name, found in self.answers(weights, names, part).items()}

    def own_answers(self, experts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Whether each expert answers the inputs of its own task right."""
        return {name: self.answers(self.whole(expert), [name])[name] for name, expert in experts.items()}

    def own_scores(self, experts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
        """Accuracy of each expert on its own task."""
        return {name: float(found.float().mean()) for name, found in self.own_answers(experts).items()}


@dataclass(frozen=True)
class Classifiers(Experts[Task]):
    """Backbones with a head for every task."""

    heads: Mapping[str, Mapping[str, Tensor]]

    @abstractmethod
    def logits(self, backbone: nn.Module, name: str, items: Sequence[int], part: Part) -> Tensor:
        """The logits of some inputs of a task through the task's head, in their order."""

    @torch.no_grad()
    def ask(self, weights: Mapping[str, Tensor], items: Mapping[str, Sequence[int]], part: Part) -> dict[str, Tensor]:
        backbone = self.backbone(weights)
        return {
            name: self.logits(backbone, name, chosen, part).argmax(1)
            == getattr(self.tasks[name], part).labels[list(chosen)]
            for name, chosen in items.items()
        }


def floats(directory: Path) -> State:
    """The floating-point tensors of a checkpoint directory of one file."""
    found = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


def changed(base: Mapping[str, Tensor], experts: Iterable[Mapping[str, Tensor]]) -> list[str]:
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
