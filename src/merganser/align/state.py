"""Convert anything with weights to a state dict."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from os import PathLike

import torch
from torch import Tensor, nn

from merganser.align.symmetries import Symmetry
from merganser.checkpoints import Checkpoint
from merganser.checkpoints import open as open_checkpoint
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError
from merganser.modules.functional import combine

State = dict[str, Tensor]


def state_of(model: Reference) -> State:
    """Return the tensors of a model by name, shared with it; they must not be modified."""
    if isinstance(model, str | PathLike):
        model = open_checkpoint(model)
    if not isinstance(model, nn.Module | Checkpoint | Mapping):
        raise InputError(f"a model is a module, a checkpoint, a path or a dict of tensors, not {type(model).__name__}")
    named = model.state_dict() if isinstance(model, nn.Module | Checkpoint) else model
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name!r} is no tensor but {type(tensor).__name__}: give a dict of the tensors alone")
    return {name: tensor.detach() for name, tensor in named.items()}


def check_symmetry(symmetry: object) -> None:
    """Refuse anything but a symmetry."""
    if not isinstance(symmetry, Symmetry):
        raise InputError(
            f"models are aligned along a Symmetry, as align.symmetry(module, inputs) finds it, not a "
            f"{type(symmetry).__name__}"
        )


def check_models(models: object) -> None:
    """Refuse a single model, or models by name, in place of a list of them."""
    if isinstance(models, Mapping):
        raise InputError("models are a list, in an order of their own: write [*models.values()], not a mapping")
    if isinstance(models, str | PathLike | nn.Module | Checkpoint) or not isinstance(models, Iterable):
        raise InputError(f"models are a list, as in [first, second], not a single {type(models).__name__}")


def states_of(models: Sequence[Reference], symmetry: Symmetry, least: int = 1) -> list[State]:
    """Return the states of models, checked for alignment: tensors and shapes of the symmetry, all finite.

    States of modules are copies, so that further training does not change them. Missing tied names are added.
    """
    check_symmetry(symmetry)
    check_models(models)
    states = [_complete(_copy_module_state(model), symmetry) for model in models]
    if len(states) < least:
        raise InputError(f"needs at least {least} models, got {len(states)}")
    for position, (model, state) in enumerate(zip(models, states, strict=True)):
        label = model.label if isinstance(model, Checkpoint) else f"model {position}"
        if odd := sorted(state.keys() ^ symmetry.axes.keys()):
            where = "only in the model" if odd[0] in state else "only in the symmetry"
            raise InputError(f"{label} and the symmetry differ in {len(odd)} tensors; {odd[0]!r} is {where}")
        for name, tensor in state.items():
            if tuple(tensor.shape) != (expected := symmetry.tensor_shape(name)):
                raise InputError(
                    f"{name!r} of {label} is {tuple(tensor.shape)}, the symmetry was derived for {expected}"
                )
            if tensor.is_meta:
                raise InputError(f"{name!r} of {label} is on the meta device: it has no values to align")
            if tensor.is_floating_point() and tensor.element_size() == 1:
                raise InputError(f"{name!r} of {label} is {tensor.dtype}: convert it to a wider type first")
        for name in (name for name in symmetry.axes if name not in symmetry.buffers):
            if state[name].is_complex() != states[0][name].is_complex():
                own, first = ("complex" if s[name].is_complex() else "real" for s in (state, states[0]))
                raise InputError(f"{name!r} of {label} is {own}, of model 0 it is {first}: use one type for all")
            if not torch.isfinite(state[name]).all():
                raise InputError(f"{name!r} of {label} has entries that are not finite")
    return [symmetry.canonical.of(state) for state in states]


def _copy_module_state(model: Reference) -> State:
    state = state_of(model)
    return {name: tensor.clone() for name, tensor in state.items()} if isinstance(model, nn.Module) else state


def _complete(state: State, symmetry: Symmetry) -> State:
    """Return the state with every tied name; files often store only one of them."""
    for alias, name in symmetry.aliases.items():
        for missing, present in ((alias, name), (name, alias)):
            if missing not in state and present in state:
                state[missing] = state[present]
    return state


def fingerprint(state: State, symmetry: Symmetry) -> str:
    """Return a digest of every weight, tied ones once: the identity of a model, independent of its source."""
    digest = hashlib.sha256()
    for name in sorted(state.keys() - symmetry.aliases.keys()):
        tensor = state[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def shares_of(count: int, weights: Sequence[float] | None) -> list[float]:
    """Return weights of `count` models as shares wᵢ / Σ wᵢ; equal if none are given."""
    given = [1.0] * count if weights is None else [float(w) for w in weights]
    if len(given) != count or not all(map(isfinite, given)) or sum(given) == 0:
        raise InputError(f"{count} models need {count} finite weights with a sum that is not zero, got {given}")
    return [weight / sum(given) for weight in given]


def average(states: Sequence[State], weights: Sequence[float] | None = None) -> State:
    """Return the weighted mean Σ wᵢθᵢ / Σ wᵢ of every tensor; counters are the first model's.

    A tensor that is equal in all models (a table of rotary frequencies) is unchanged, to the last bit.
    """
    shares = shares_of(len(states), weights)
    first, *others = states
    same = {name: tensor for name, tensor in first.items() if all(torch.equal(tensor, s[name]) for s in others)}
    mean = combine([{name: s[name] for name in first if name not in same} for s in states], shares)
    return {name: same[name].clone() if name in same else mean[name] for name in first}
