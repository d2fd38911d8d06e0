"""Minimise the entropy of predictions on unlabelled inputs over the parameters of a merge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from merganser.errors import InputError
from merganser.modules.batches import InputsLike
from merganser.modules.functional import Head, Weights, call


@dataclass(frozen=True)
class Descent:
    """Mean entropy over the tasks before and after, and the entropy of each step's batches."""

    before: float
    after: float
    history: tuple[float, ...]


def minimise_entropy(
    module: nn.Module,
    merged: Callable[[], Weights],
    learned: Sequence[Tensor],
    inputs: Mapping[str, Sequence[InputsLike]],
    *,
    heads: Mapping[str, Head] | None = None,
    learning_rate: float = 1e-3,
    steps: int = 500,
) -> Descent:
    """Minimise Σ_t H(softmax f(x_t; θ)) by Adam, with one batch of each task in every step.

    Args:
        module: The architecture.
        merged: Computes the weights θ from the learned tensors.
        learned: The tensors to optimise.
        inputs: Batches of each task.
        heads: For each task, a function from the module's output to logits.
        learning_rate: Adam's learning rate.
        steps: The number of steps.

    Returns:
        The entropy before, during and after. Buffers, such as the running statistics of BatchNorm, have no gradients.
    """
    if empty := [task for task, batches in inputs.items() if not batches]:
        raise InputError(f"no inputs for task {empty[0]!r}")

    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}

    def entropy(weights: Weights, task: str, batch: InputsLike) -> Tensor:
        weights = {name: value.detach() if name in buffers else value for name, value in weights.items()}
        logits = call(module, weights, batch)
        return prediction_entropy(heads[task](logits) if heads else logits)

    def overall() -> float:
        with torch.no_grad():
            weights = merged()
            means = [torch.stack([entropy(weights, t, b) for b in batches]).mean() for t, batches in inputs.items()]
            return float(torch.stack(means).mean())

    before = overall()
    if math.isnan(before):
        raise InputError("the entropy of the predictions is not a number: look for NaN or infinity in the inputs")
    optimiser = torch.optim.Adam(learned, lr=learning_rate)
    streams = {task: itertools.cycle(batches) for task, batches in inputs.items()}
    history = []
    for _ in range(steps):
        weights = merged()
        loss = torch.stack([entropy(weights, task, next(stream)) for task, stream in streams.items()]).sum()
        for parameter, gradient in zip(
            learned, torch.autograd.grad(loss, learned, materialize_grads=True), strict=True
        ):
            parameter.grad = gradient
        optimiser.step()
        history.append(float(loss.detach()) / len(streams))
    return Descent(before, overall(), tuple(history))


def prediction_entropy(logits: Tensor) -> Tensor:
    """Return the mean Shannon entropy (nats) of softmax(logits) over the last axis."""
    log_p = logits.log_softmax(-1)
    return torch.mean(-(log_p.exp() * log_p).sum(-1))
