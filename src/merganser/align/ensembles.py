"""Ensembles from a universe: in one basin, every convex combination of the mapped models is a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from merganser.align.renormalisation import repair
from merganser.align.universes import Universe
from merganser.errors import InputError
from merganser.modules.batches import InputsLike
from merganser.modules.functional import Prepare, prepare_module


def sample_weights(models: int, samples: int, seed: int = 0, concentration: float = 1.0) -> NDArray[np.float64]:
    """Draw convex combinations from a symmetric Dirichlet: shape (samples, models), rows sum to one."""
    if samples < 1 or concentration <= 0:
        raise InputError(f"needs samples ≥ 1 and concentration > 0, got {samples} and {concentration}")
    return np.random.default_rng(seed).dirichlet(np.full(models, concentration), size=samples)


class UniverseEnsemble(nn.Module):
    """The mean of the predictions of models sampled in a universe.

    Args:
        members: The sampled models.
        predict: Maps a member's output to what is averaged.

    Example:
        >>> universe = mg.align.universe(models, mg.align.symmetry(models[0], images))
        >>> probabilities = mg.align.ensemble(base, universe, samples=2)(images)
    """

    def __init__(self, members: list[nn.Module], predict: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.predict = predict

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([self.predict(member(*args, **kwargs)) for member in self.members]).mean(dim=0)


def _probabilities(logits: Any) -> Tensor:
    return torch.as_tensor(logits).softmax(dim=-1)


def ensemble(
    module: nn.Module,
    universe: Universe,
    *,
    samples: int = 5,
    seed: int = 0,
    concentration: float = 1.0,
    batches: Sequence[InputsLike] | None = None,
    prepare: Prepare | None = None,
    predict: Callable[[Any], Tensor] = _probabilities,
) -> UniverseEnsemble:
    """Sample convex combinations of the models of a universe and average their predictions.

    Args:
        module: The architecture.
        universe: The models in their common space.
        samples: The number of combinations.
        seed: The seed of the combinations.
        concentration: The concentration of the Dirichlet distribution of weights; small values stay close to single
            models.
        batches: Inputs for REPAIR of each sampled model against the models in the universe, by its weights. Networks
            with BatchNorm get fresh statistics.
        prepare: Applied to each sampled module, after REPAIR.
        predict: Maps outputs to what is averaged; by default class probabilities from logits.

    Returns:
        The ensemble, a callable of inputs.

    Example:
        >>> universe = mg.align.universe(models, mg.align.symmetry(models[0], images))
        >>> mg.align.ensemble(base, universe, samples=2)(images).shape
        torch.Size([12, 4])
    """
    if not isinstance(universe, Universe):
        raise InputError(
            f"an ensemble is drawn from a Universe, as align.universe finds it, not {type(universe).__name__}"
        )
    if not isinstance(module, nn.Module):
        raise InputError(
            f"an ensemble runs its models: give their architecture as a module, not {type(module).__name__}"
        )
    endpoints = [] if batches is None else [universe.to_universe(model) for model in range(len(universe))]
    members = []
    for weights in sample_weights(len(universe), samples, seed, concentration).tolist():
        member = deepcopy(module)
        member.load_state_dict(universe.merged(weights))
        if batches is not None:
            member = repair(member, endpoints, batches, weights=weights)
        members.append(prepare_module(member, prepare))
    return UniverseEnsemble(members, predict).eval()
