"""Straight-through estimator: learn the permutation from the loss of the midpoint.

    min over Θ̃ of L(½ (Θ_a + proj(Θ̃))),   proj(Θ̃) = the π(Θ_b) nearest to Θ̃

Θ̃ starts at Θ_a. Every batch projects by weight matching, started from the last projection, evaluates the loss at the
midpoint, and passes the gradient through the projection to Θ̃ (Git Re-Basin, after Bengio et al. 2013).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from merganser.align.ascent import Step
from merganser.align.matches import Match
from merganser.align.pairwise import weight_matching
from merganser.align.permutations import Permutations, identity
from merganser.align.solver import objective_of
from merganser.align.state import Model, State, average, states_of
from merganser.align.symmetries import Symmetry
from merganser.errors import InputError
from merganser.modules.batches import Batch, fitting, labelled, several

#: From outputs of the model and targets to a scalar.
Loss = Callable[[Any, Any], Tensor]


def straight_through(
    a: Model,
    b: Model,
    symmetry: Symmetry,
    *,
    batches: Iterable[Batch],
    loss: Loss,
    epochs: int = 1,
    learning_rate: float = 1e-3,
    start: str | Permutations = "propagate",
    seed: int = 0,
    workers: int | None = None,
) -> Match:
    """Match b to a for the lowest mean loss of the midpoint over an epoch of batches.

    Batches are (inputs, targets); `loss(outputs, targets)` is differentiated. One of the models must be a module: it
    provides the architecture, not its tensors. BatchNorm layers use the statistics of each batch, since those of two
    models cannot be averaged.
    """
    module = next((model for model in (a, b) if isinstance(model, nn.Module)), None)
    if module is None:
        raise InputError("the straight-through estimator runs the midpoint: give at least one module")
    several(batches, "batches")
    state_a, state_b = states_of([a, b], symmetry)
    network = deepcopy(module).eval()
    for layer in network.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.train()
    current = weight_matching(state_a, state_b, symmetry, start=start, tries=1, seed=seed, workers=workers)
    latent = {name: state_a[name].clone().requires_grad_() for name in symmetry.objective}
    optimiser = torch.optim.Adam(latent.values(), lr=learning_rate)
    best, lowest = current, _mean_loss(network, average([state_a, current.apply(state_b)]), batches, loss)
    trace = [Step("weights", current.objective, loss=lowest)]
    for _ in range(epochs):
        for batch in batches:
            wanted = current.apply(state_b) | {name: tensor.detach() for name, tensor in latent.items()}
            last = current.permutations
            current = weight_matching(wanted, state_b, symmetry, start=last, tries=1, seed=seed, workers=workers)
            optimiser.zero_grad()
            midpoint = _straight_through(average([state_a, current.apply(state_b)]), latent, symmetry)
            _loss(network, midpoint, batch, loss).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        reached = _mean_loss(network, average([state_a, current.apply(state_b)]), batches, loss)
        objective = objective_of([state_a, state_b], [identity(symmetry), current.permutations], symmetry)
        current = replace(current, objective=objective)
        trace.append(Step("ste", objective, loss=reached))
        if reached < lowest:
            best, lowest = current, reached
    return replace(best, trace=tuple(trace))


def _straight_through(midpoint: State, latent: State, symmetry: Symmetry) -> State:
    """Return the midpoint in value, with the derivative of ½ Θ̃. Tied tensors stay tied."""
    value = {name: midpoint[name] + 0.5 * (tensor - tensor.detach()) for name, tensor in latent.items()}
    whole = midpoint | value
    return whole | {alias: whole[name] for alias, name in symmetry.aliases.items()}


def _loss(network: nn.Module, state: State, batch: Batch, loss: Loss) -> Tensor:
    inputs, targets = labelled(batch)
    return loss(functional_call(network, state, *fitting(network, inputs)), targets)


def _mean_loss(network: nn.Module, state: State, batches: Iterable[Batch], loss: Loss) -> float:
    with torch.no_grad():
        losses = [float(_loss(network, state, batch, loss)) for batch in batches]
    if not losses:
        raise InputError("batches are empty; an iterator is spent after one pass: give a list or a data loader")
    return sum(losses) / len(losses)
