"""REPAIR: give a merged network's activations the means and standard deviations of its endpoints.

Averaging shrinks the variance of activations. Every channel of every affine layer of the merged network is corrected to

    E[X] = Σ wᵢ E[Xᵢ],    std(X) = Σ wᵢ std(Xᵢ)

(the mean of standard deviations, not of variances) with Xᵢ the activations of endpoint i *as permuted into the common
space*. The correction X ↦ sX + c is folded into weight and bias: no new layers. Networks with BatchNorm
get their running statistics recomputed instead, which does the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from merganser.align.state import State, average, shares_of, state_of
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError
from merganser.modules.batches import InputsLike, drop_targets, find_first_tensor
from merganser.modules.moments import (
    Moments,
    channel_rows,
    channels_second,
    check_finite,
    evaluating,
    hook_outputs,
    output_axis,
    run,
)

BATCH_NORMS = nn.modules.batchnorm._BatchNorm


def repair(
    merged: nn.Module,
    endpoints: Sequence[Reference],
    batches: Iterable[InputsLike],
    *,
    weights: Sequence[float] | None = None,
    skip: Sequence[str] = (),
    sequential: bool = True,
) -> nn.Module:
    """Return a copy of a merged network whose activations have the statistics of its endpoints (REPAIR).

    Averaging shrinks the variance of activations. The correction is folded into the weights, so that the architecture
    stays the same. Layers that share their weight with another or compute it (`weight_norm`) are left alone, and a
    layer without bias is only scaled. With any BatchNorm in the network this is `reset_batch_norm`.

    Args:
        merged: The merged network.
        endpoints: The models in the space of the merge (`Universe.to_universe(i)`), as modules or state dicts.
        batches: Inputs, or pairs of (inputs, targets) whose targets are ignored.
        weights: The weights of the merge, if it was not the plain mean.
        skip: Names of layers to leave alone.
        sequential: Correct one layer after another, each measured behind the corrected ones: exact on these batches,
            with one pass for every layer. Otherwise one pass corrects all layers, each batch by its own statistics.

    Returns:
        The repaired copy.

    Example:
        >>> universe = mg.align.universe(models, mg.align.symmetry(models[0], images))
        >>> status = base.load_state_dict(universe.merged())
        >>> repaired = mg.align.repair(base, [universe.to_universe(i) for i in range(3)], [images])
    """
    if not endpoints:
        raise InputError("REPAIR needs the endpoints of the merge, permuted into its space")
    if not isinstance(merged, nn.Module):
        raise InputError(f"REPAIR runs the merged network: give a module, not {type(merged).__name__}")
    states = [_read_endpoint(merged, position, endpoint) for position, endpoint in enumerate(endpoints)]
    shares = shares_of(len(states), weights)
    repaired = deepcopy(merged)
    layers = _layers(repaired, skip)
    if any(isinstance(module, BATCH_NORMS) for module in repaired.modules()):
        return reset_batch_norm(repaired, batches)
    goals = _average_goals(repaired, states, batches, layers, shares)
    with evaluating(repaired):
        if not sequential:
            return _correct_in_one_pass(repaired, batches, goals)
        for name, goal in goals.items():  # in the order of the forward pass
            _fold(repaired.get_submodule(name), goal, _measure_layers(repaired, batches, [name])[name])
    return repaired


def reset_batch_norm(model: nn.Module, batches: Iterable[InputsLike]) -> nn.Module:
    """Return a copy whose BatchNorm statistics are the means over batches, each with the weight of its samples.

    Args:
        model: The network.
        batches: Inputs, or pairs of (inputs, targets) whose targets are ignored.

    Returns:
        The copy; each layer is measured behind normalised ones.

    Example:
        >>> network = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        >>> fresh = mg.align.reset_batch_norm(network, [images])
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"statistics are measured by running the network: give a module, not {type(model).__name__}")
    fresh = deepcopy(model)
    with evaluating(fresh):
        momenta = {}
        for name, module in fresh.named_modules():
            if isinstance(module, BATCH_NORMS) and module.track_running_stats:
                momenta[name] = module.momentum
                module.reset_running_stats()
                module.train()
        seen = 0

        def weigh(batch: InputsLike) -> None:
            """Set the momentum to the share of a batch among the samples so far: a cumulative mean."""
            nonlocal seen
            size = len(find_first_tensor(drop_targets(fresh, batch)))
            seen += size
            for name in momenta:
                fresh.get_submodule(name).momentum = size / seen  # type: ignore[assignment]

        try:
            run(fresh, batches, weigh)
        except InputError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise InputError("BatchNorm needs batches of more than one sample to measure a variance") from error
        for name, momentum in momenta.items():
            norm = fresh.get_submodule(name)
            check_finite(torch.stack([norm.running_mean, norm.running_var]), name)  # type: ignore[list-item]
            norm.momentum = momentum  # type: ignore[assignment]
    return fresh


def _layers(model: nn.Module, skip: Sequence[str]) -> list[str]:
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    modules = dict(model.named_modules())
    if isinstance(skip, str):
        raise InputError(f"skip is a list of layers: write skip=[{skip!r}]")
    if unknown := [name for name in skip if name not in modules]:
        raise InputError(f"no layer {unknown[0]!r} to skip")
    return [
        name
        for name, module in modules.items()
        if output_axis(module) is not None
        and name not in skip
        and (weight := module._parameters.get("weight")) is not None
        and owners[id(weight)] == 1
    ]


def _read_endpoint(merged: nn.Module, position: int, endpoint: Reference) -> State:
    """Return the weights of an endpoint, which must fit the merged network."""
    expected, state = state_of(merged), state_of(endpoint)
    if odd := sorted(expected.keys() ^ state.keys()):
        where = "only in the endpoint" if odd[0] in state else "only in the merged network"
        raise InputError(f"endpoint {position} is another architecture than the merged network: {odd[0]!r} is {where}")
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            raise InputError(
                f"{name!r} of endpoint {position} is {tuple(state[name].shape)}, of the merged network "
                f"{tuple(tensor.shape)}"
            )
    return state


def _average_goals(
    model: nn.Module,
    endpoints: Sequence[State],
    batches: Iterable[InputsLike],
    layers: Sequence[str],
    shares: Sequence[float],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the weighted means of the endpoints' means and standard deviations, in the order of the forward pass."""
    found = []
    for endpoint in endpoints:
        module = deepcopy(model)
        module.load_state_dict(endpoint)
        with evaluating(module):
            found.append(_measure_layers(module, batches, layers))
    means = average([{name: mean for name, (mean, _) in own.items()} for own in found], shares)
    stds = average([{name: std for name, (_, std) in own.items()} for own in found], shares)
    return {name: (means[name], stds[name]) for name in means}


def _measure_layers(
    model: nn.Module, batches: Iterable[InputsLike], layers: Sequence[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean and standard deviation of every channel of the layers that ran, in the order of their first call."""
    moments: dict[str, Moments] = {}

    def watch(name: str, output: Tensor) -> None:
        moments.setdefault(name, Moments()).add(channel_rows(model.get_submodule(name), output))

    with hook_outputs(model, {name: partial(watch, name) for name in layers}):
        run(model, batches)
    found = {name: own.values for name, own in moments.items()}
    for name, own in found.items():
        check_finite(torch.stack(own), name)
    return found


def _compute_correction(
    goal: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor], has_bias: bool
) -> tuple[Tensor, Tensor]:
    """Return scale and shift X ↦ sX + c; a constant channel is only shifted."""
    (mean, std), (wanted_mean, wanted_std) = now, goal
    alive = std > 1e-12 * (1.0 + mean.abs())
    scale = torch.where(alive, wanted_std / torch.where(alive, std, 1.0), 1.0)
    return scale, wanted_mean - scale * mean if has_bias else torch.zeros_like(mean)


def _fold(layer: nn.Module, goal: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor]) -> None:
    weight, bias, axis = layer.weight, layer.bias, output_axis(layer)
    if not isinstance(weight, Tensor) or axis is None:
        raise TypeError(f"{type(layer).__name__} has no weight to fold into")
    scale, shift = _compute_correction(goal, now, isinstance(bias, Tensor))
    with torch.no_grad():
        moved = weight.double().movedim(axis, 0)
        rows = moved.reshape(scale.numel(), -1) * scale[:, None].to(moved)
        weight.copy_(rows.reshape(moved.shape).movedim(0, axis))
        if isinstance(bias, Tensor):
            flat = bias.double().flatten()
            bias.copy_((flat * scale.to(flat) + shift.to(flat)).reshape(bias.shape))


def _correct_in_one_pass(
    model: nn.Module, batches: Iterable[InputsLike], goals: Mapping[str, tuple[Tensor, Tensor]]
) -> nn.Module:
    """Correct every layer on every batch by that batch's statistics, and fold in the overall correction."""
    moments = {name: Moments() for name in goals}

    def correct(name: str, output: Tensor) -> Tensor:
        layer = model.get_submodule(name)
        rows = channel_rows(layer, output)
        moments[name].add(rows)
        batch = Moments()
        batch.add(rows)
        scale, shift = _compute_correction(goals[name], batch.values, layer.bias is not None)
        shape = layer.normalized_shape if isinstance(layer, nn.LayerNorm) else (-1,)
        trailing = output.dim() - 2 if channels_second(layer, output) else 0
        view = (*shape, *([1] * trailing))
        return output * scale.to(output).reshape(view) + shift.to(output).reshape(view)

    with hook_outputs(model, {name: partial(correct, name) for name in goals}):
        run(model, batches)
    for name, goal in goals.items():
        _fold(model.get_submodule(name), goal, moments[name].values)
    return model
