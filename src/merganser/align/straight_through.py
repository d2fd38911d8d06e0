"""Straight-through estimator: learn permutations and rotations from the loss of the midpoint.

    min over Z of L(½ (Θ_a + proj(Z)(Θ_b)))

Every batch projects what is learned to the group of the symmetry, evaluates the loss at the midpoint, and passes the
gradient through the projection as if it were the identity (Bengio et al. 2013). Permutations are learned as weights, as
published with Git Re-Basin; symmetries with rotations as the maps themselves, which is how generalised symmetries are
learned in arXiv:2506.22712. See `latents`.
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
from merganser.align.latents import LatentMaps, LatentWeights
from merganser.align.matches import Match
from merganser.align.pairwise import weight_matching
from merganser.align.permutations import Permutations, identity
from merganser.align.solver import objective_of
from merganser.align.state import State, average, states_of
from merganser.align.symmetries import Symmetry
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError
from merganser.modules.batches import Batch, fitting, require_several, require_targets

#: From outputs of the model and targets to a scalar.
Loss = Callable[[Any, Any], Tensor]


@torch.inference_mode(False)  # it learns by gradients
def straight_through(
    a: Reference,
    b: Reference,
    symmetry: Symmetry,
    *,
    batches: Iterable[Batch],
    loss: Loss,
    epochs: int = 1,
    learning_rate: float | None = None,
    start: str | Permutations = "propagate",
    seed: int = 0,
    workers: int | None = None,
) -> Match:
    """Match b to a for the lowest mean loss of the midpoint after an epoch of batches.

    Batches are (inputs, targets); `loss(outputs, targets)` is differentiated. One of the models must be a module: it
    provides the architecture, not its tensors. BatchNorm layers use the statistics of each batch, since those of two
    models cannot be averaged. The learning rate is one of weights for permutations (0.001 by default) and one of maps
    if the symmetry has rotations (0.03, falling to zero). A few hundred steps are usual.
    """
    module = next((model for model in (a, b) if isinstance(model, nn.Module)), None)
    if module is None:
        raise InputError("the straight-through estimator runs the midpoint: give at least one module")
    require_several(batches, "batches")
    state_a, state_b = states_of([a, b], symmetry)
    network = deepcopy(module).eval()
    for layer in network.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.train()
    best = weight_matching(state_a, state_b, symmetry, start=start, tries=1, seed=seed, workers=workers)
    lowest, count = _average_loss(network, average([state_a, best.apply(state_b)]), batches, loss)
    trace = [Step("weights", best.objective, loss=lowest)]
    begin = (state_a, state_b, symmetry, best.permutations)
    latent: LatentWeights | LatentMaps
    if any(atom.group != "permutation" for atom in symmetry.atoms.values()):
        latent = LatentMaps(*begin, 0.03 if learning_rate is None else learning_rate, epochs * count, workers)
    else:
        latent = LatentWeights(*begin, 1e-3 if learning_rate is None else learning_rate, seed, workers)
    for _ in range(epochs):
        for batch in batches:
            latent.step(_loss(network, latent.midpoint(), batch, loss))
        permutations = latent.project()
        objective = objective_of([state_a, state_b], [identity(symmetry), permutations], symmetry)
        found = replace(best, permutations=permutations, objective=objective)
        reached, _ = _average_loss(network, average([state_a, found.apply(state_b)]), batches, loss)
        trace.append(Step("ste", objective, loss=reached))
        if reached < lowest:
            best, lowest = found, reached
    return replace(best, trace=tuple(trace))


def _loss(network: nn.Module, state: State, batch: Batch, loss: Loss) -> Tensor:
    inputs, targets = require_targets(batch)
    return loss(functional_call(network, state, *fitting(network, inputs)), targets)


def _average_loss(network: nn.Module, state: State, batches: Iterable[Batch], loss: Loss) -> tuple[float, int]:
    """Return the mean loss over batches, and how many there are."""
    with torch.no_grad():
        losses = [float(_loss(network, state, batch, loss)) for batch in batches]
    if not losses:
        raise InputError("batches are empty; an iterator is spent after one pass: give a list or a data loader")
    return sum(losses) / len(losses), len(losses)
