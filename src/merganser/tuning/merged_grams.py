"""RegMean++: regressions on the inputs of each layer of the merged network, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.checkpoints.tensor_names import block_of
from merganser.errors import InputError
from merganser.modules.functional import check_state, combine, evaluation_copy, run
from merganser.recipes.running import merge
from merganser.tuning.gram import linear_grams
from merganser.tuning.held_out import Batches, Data, Models, label, match_data, require_module
from merganser.tuning.statistics import Statistics


def regmean_pp(
    models: Models,
    base: nn.Module,
    data: Data,
    *,
    alpha: float = 0.95,
    include: Sequence[str] = ("*",),
) -> tuple[dict[str, Tensor], dict[str, Statistics]]:
    """Merge linear layers by RegMean with Gram matrices of the merged network.

    Blocks of layers are merged in the order in which inputs reach them. The Gram matrices of a block are those of its
    inputs from the merged blocks before it, passed through each model's own block (Nguyen et al. 2026,
    arXiv:2508.03121). Tensors that are not weights of linear layers are averaged. Passes the data of every model
    through the network once per block.

    Args:
        models: Checkpoints, state dicts or modules, in a list or by label.
        base: A module of their architecture; its weights are not used.
        data: Unlabelled batches for each model, in a list or by label; a few hundred inputs are enough.
        alpha: Factor of the off-diagonal entries of the Gram matrices.
        include: Globs of the names of the linear layers.

    Returns:
        The merged weights, and the Gram matrices by model, which give the same merge with the method `regmean`.

    Raises:
        InputError: If the base is not a module, data and models do not match, or no linear layer is reached.

    Example:
        >>> data = {"math": batches, "code": batches}
        >>> weights, grams = mg.tuning.regmean_pp(experts, base, data)
        >>> grams["math"].tensors["0.weight"].shape
        torch.Size([8, 8])
    """
    module = evaluation_copy(require_module(base, "base"))
    batches = match_data(data, models)
    if empty := [key for key, each in batches.items() if next(iter(each), None) is None]:
        raise InputError(f"data of {empty[0]}: no batches")
    names = list(module.state_dict())
    states = {key: _read(model, names) for key, model in label(models).items()}
    for key, state in states.items():
        check_state(module, state, key)
    merged = combine(list(states.values()), [1 / len(states)] * len(states))
    tensors: dict[str, dict[str, Tensor]] = {key: {} for key in states}
    samples = dict.fromkeys(states, 0)
    for block, layers in _blocks(module, next(iter(batches.values())), include).items():
        own = [name for name in names if block_of(name) == block]
        for key, state in states.items():
            weights = merged | {name: state[name] for name in own}
            found = linear_grams(module, batches[key], weights=weights, include=layers)
            tensors[key] |= found.tensors
            samples[key] = max(samples[key], found.samples)
        some = next(iter(tensors.values())).keys() & set(own)
        sides = [{name: grams[name] for name in some} for grams in tensors.values()]
        parts = [{name: state[name] for name in some} for state in states.values()]
        merged |= merge(parts, "regmean", statistics={"gram": sides}, alpha=alpha)
    return merged, {key: Statistics("gram", grams, samples[key]) for key, grams in tensors.items()}


def _read(model: Reference, names: Sequence[str]) -> dict[str, Tensor]:
    opened = open_checkpoint(model)
    return {name: opened[name] for name in names if name in opened}


def _blocks(module: nn.Module, batches: Batches, include: Sequence[str]) -> dict[str, list[str]]:
    """Return the linear layers by block, in the order in which a first batch calls them."""
    found: dict[str, list[str]] = {}

    def note(name: str) -> None:
        layers = found.setdefault(block_of(f"{name}.weight"), [])
        if name not in layers:
            layers.append(name)

    with ExitStack() as set_hooks, torch.no_grad():
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear) and any(fnmatchcase(name, pattern) for pattern in include):
                hook = layer.register_forward_pre_hook(lambda _layer, _args, name=name: note(name))
                set_hooks.callback(hook.remove)
        run(module, next(iter(batches)))
    if not found:
        raise InputError(f"no linear layer that matches {list(include)} is reached by the data")
    return found
