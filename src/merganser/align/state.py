"""Whatever holds weights, as one state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from merganser.align.symmetries import Symmetry
from merganser.checkpoints.base import Checkpoint
from merganser.errors import InputError

#: A module, a checkpoint, or a mapping from names to tensors.
Model = nn.Module | Checkpoint | Mapping[str, Tensor]
State = dict[str, Tensor]


def state_of(model: Model) -> State:
    """The tensors of a model by name, shared with it: never to be written into."""
    named = model if isinstance(model, Mapping) else model.state_dict()
    return {name: tensor.detach() for name, tensor in named.items()}


def states_of(models: Sequence[Model], symmetry: Symmetry, least: int = 1) -> list[State]:
    """The states of models that can be aligned: the tensors and shapes the symmetry was derived for, all finite."""
    states = [state_of(model) for model in models]
    if len(states) < least:
        raise InputError(f"needs at least {least} models, got {len(states)}")
    for position, state in enumerate(states):
        if odd := sorted(state.keys() ^ symmetry.axes.keys()):
            where = "only in the model" if odd[0] in state else "only in the symmetry"
            raise InputError(f"model {position} and the symmetry differ in {len(odd)} tensors; {odd[0]!r} is {where}")
        for name, tensor in state.items():
            if tuple(tensor.shape) != (expected := symmetry.tensor_shape(name)):
                raise InputError(
                    f"{name!r} of model {position} is {tuple(tensor.shape)}, the symmetry was derived for {expected}"
                )
        for name in symmetry.objective:
            if not torch.isfinite(state[name]).all():
                raise InputError(f"{name!r} of model {position} has entries that are not finite")
    return states


def average(states: Sequence[State], weights: Sequence[float] | None = None) -> State:
    """The weighted mean Σ wᵢθᵢ / Σ wᵢ of every floating-point tensor; counters are the first model's."""
    shares = [1.0] * len(states) if weights is None else [float(w) for w in weights]
    if len(shares) != len(states) or sum(shares) == 0:
        raise InputError(f"{len(states)} models need {len(states)} weights with a sum that is not zero, got {shares}")
    mean: State = {}
    for name, first in states[0].items():
        if not first.is_floating_point():
            mean[name] = first.clone()
            continue
        wide = torch.promote_types(first.dtype, torch.float32)
        total = torch.zeros(first.shape, dtype=wide, device=first.device)
        for share, state in zip(shares, states, strict=True):
            total.add_(state[name].to(wide), alpha=share / sum(shares))
        mean[name] = total.to(first.dtype)
    return mean
